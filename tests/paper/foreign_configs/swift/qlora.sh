#!/bin/bash
swift sft --model Qwen/Qwen2.5-14B --tuner_type lora --lora_rank 16 --lora_alpha 32 --learning_rate 1e-4 --num_train_epochs 1 --quant_method bnb --quant_bits 4 --bnb_4bit_compute_dtype bfloat16 \
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
