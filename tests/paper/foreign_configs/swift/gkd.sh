#!/bin/bash
swift rlhf --rlhf_type gkd --model Qwen/Qwen3-4B --teacher_model Qwen/Qwen3-30B-A3B --teacher_deepspeed zero3 --deepspeed zero2 --tuner_type lora --learning_rate 2e-4 --seq_kd false --lmbda 0.5 \
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
