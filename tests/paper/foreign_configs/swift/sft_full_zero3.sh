#!/bin/bash
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --tuner_type full --learning_rate 1e-5 --deepspeed zero3 --num_train_epochs 1 \
    --dataset data/train.jsonl \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 1 \
    --per_device_eval_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --max_length 4096 \
    --attn_impl flash_attn \
    --save_steps 100 --save_total_limit 2 --logging_steps 5 \
    --warmup_ratio 0.05 \
    --dataloader_num_workers 4 --dataset_num_proc 4 \
    --output_dir output/run
