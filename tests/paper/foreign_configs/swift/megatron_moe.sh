#!/bin/bash
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B \
    --dataset data/train.jsonl \
    --save_safetensors true \
    --tuner_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear \
    --expert_model_parallel_size 8 \
    --moe_permute_fusion true --moe_grouped_gemm true --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 1e-3 \
    --micro_batch_size 1 --global_batch_size 16 \
    --packing true --max_length 8192 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \
    --num_train_epochs 1 --lr 1e-4 --lr_warmup_fraction 0.05 --min_lr 1e-5 \
    --finetune false --cross_entropy_loss_fusion true \
    --output_dir output/megatron --save_steps 100 \
    --attention_backend flash --dataset_num_proc 8
