#!/bin/bash
export MODEL=Qwen/Qwen2.5-7B
ARGS=(
    --model_name_or_path $MODEL
    --train_file data/train.jsonl
    --output_dir outputs/run
    --per_device_train_batch_size 1
    --gradient_accumulation_steps 8
    --learning_rate 1e-5
    --deepspeed configs/zero3.json
    --bf16 True
    --gradient_checkpointing True
    --save_steps 100
    --save_total_limit 2
)
torchrun --standalone --nproc_per_node 8 train.py "${ARGS[@]}"
