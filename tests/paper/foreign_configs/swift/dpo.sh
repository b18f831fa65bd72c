#!/bin/bash
swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --tuner_type lora --learning_rate 1e-5 --beta 0.1 --rpo_alpha 0.1 \
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
