#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes 1
    --rdzv_endpoint $MASTER_ADDR:29401
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 40960
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 1000000 --no-masked-softmax-fusion
    --attention-dropout 0.0 --hidden-dropout 0.0
)
PARALLEL_ARGS=(--expert-model-parallel-size 4 --moe-z-loss-coeff 1e-3 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 2000
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 100
    --weight-decay 0.1 --clip-grad 1.0 --bf16 --use-distributed-optimizer
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
DATA_ARGS=(--data-path data/text_document --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer)
LOG_ARGS=(--log-interval 1 --save-interval 200 --eval-interval 500 --eval-iters 10 --save checkpoints/run --load checkpoints/run --tensorboard-dir logs)
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOG_ARGS[@]}"
