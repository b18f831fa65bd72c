#!/bin/bash
# one GPU
python run_clm.py \
    --model_name_or_path Qwen/Qwen2.5-0.5B \
    --train_file data/train.txt \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --learning_rate 5e-5 \
    --block_size 1024 \
    --num_train_epochs 1 \
    --save_steps 200 --save_total_limit 2 \
    --bf16 --do_train \
    --output_dir outputs/clm
