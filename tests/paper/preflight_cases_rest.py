"""For each rule of GW6xx to GW8xx a config that breaks it and one that does not."""

from preflight_case import Case
from preflight_texts import DENSE, MOE, axolotl, factory, megatron, megatron_swift, sbatch, swift, trl

FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"adapter": "lora", "lora_r": 16}
LUMI2 = "--partition=standard-g --nodes=2 --gpus-per-node=8 --time=24:00:00"
TORCHRUN = "srun torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint $HEAD:29400 train.py"

CASES = (
    Case("GW601", [trl(per_device_train_batch_size=4)], [trl(per_device_train_batch_size=4, packing=True)]),
    Case("GW602", [axolotl(pad_to_sequence_len=True)], [axolotl(pad_to_sequence_len=True, sample_packing=True)]),
    Case("GW603", [axolotl(sequence_len=8192)], [axolotl(sequence_len=2048)], {"p99_tokens": 1500}),
    Case("GW604", [axolotl(sequence_len=1024)], [axolotl(sequence_len=2048)], {"p99_tokens": 1500}),
    Case(
        "GW605",
        [trl(packing=True, attn_implementation="sdpa")],
        [trl(packing=True, attn_implementation="flash_attention_2")],
    ),
    Case("GW606", [axolotl(sample_packing=True, attn_implementation=None)], [axolotl(sample_packing=True)]),
    Case("GW607", [factory(packing=True)], [factory(packing=True, neat_packing=True)]),
    Case(
        "GW608",
        [trl(packing=True, packing_strategy="wrapped")],
        [trl(packing=True, packing_strategy="bfd")],
    ),
    Case("GW609", [megatron_swift("--packing true")], [megatron_swift("--packing false")], {"gpu": "mi300x"}),
    Case(
        "GW610",
        [axolotl(sample_packing=True, ring_attn_func="batch_ring")],
        [axolotl(sample_packing=True, ring_attn_func="varlen_llama3")],
    ),
    Case(
        "GW611",
        [axolotl(base_model="Kimi-Linear-48B-A3B-Base", sample_packing=True)],
        [axolotl(base_model=MOE, sample_packing=True)],
    ),
    Case("GW612", [trl(packing=True, use_cache=True)], [trl(packing=True, use_cache=False)]),
    Case("GW613", [axolotl(rl="dpo", sample_packing=True)], [axolotl(rl="dpo", sample_packing=False)]),
    Case("GW614", [factory(neat_packing=True)], [factory(neat_packing=False)]),
    Case(
        "GW615",
        [megatron("--seq-length 4090 --context-parallel-size 4")],
        [megatron("--seq-length 4096 --context-parallel-size 4")],
    ),
    Case(
        "GW651",
        [axolotl(special_tokens={"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"})],
        [axolotl(special_tokens={"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"})],
    ),
    Case("GW652", [factory(template=None)], [factory(template="qwen3")]),
    Case("GW653", [axolotl(train_on_inputs=True)], [axolotl(train_on_inputs=False)]),
    Case(
        "GW654",
        [axolotl(**LORA, tokens=["<tool>"])],
        [axolotl(**LORA, tokens=["<tool>"], lora_modules_to_save=["embed_tokens", "lm_head"])],
    ),
    Case("GW655", [factory(add_tokens="<tool>")], [factory(add_tokens="<tool>", resize_vocab=True)]),
    Case(
        "GW656",
        [trl(max_prompt_length=2048, max_length=1024)],
        [trl(max_prompt_length=512, max_length=1024)],
    ),
    Case("GW657", [axolotl(streaming=True)], [axolotl(streaming=True, max_steps=1000)]),
    Case("GW658", [trl(trust_remote_code=True)], [trl(trust_remote_code=False)]),
    Case("GW659", [trl(hub_token="hf_abcdefghijklmnopqrstuvwx")], [trl(push_to_hub=False)]),
    # --- the queue and the launcher
    Case(
        "GW701",
        [axolotl(max_steps=6060), sbatch("--time=38:00:00")],
        [axolotl(max_steps=900), sbatch("--time=38:00:00")],
        {"step_s": 125.0},
    ),
    Case("GW702", [sbatch("--requeue")], [sbatch("--requeue --open-mode=append")]),
    Case("GW703", [sbatch("--output=train.log")], [sbatch("--output=train-%j.log")]),
    Case(
        "GW704",
        [sbatch("--signal=USR1@300", "srun torchrun train.py")],
        [sbatch("--signal=B:USR1@300", "trap 'touch stop' USR1", "srun torchrun train.py")],
    ),
    Case("GW705", [sbatch("--signal=B:USR1@300")], [sbatch("--signal=B:USR1@300", "trap 'touch stop' USR1")]),
    Case("GW706", [sbatch("--signal=B:USR1@30")], [sbatch("--signal=B:USR1@300")]),
    Case("GW707", [sbatch("--dependency=afterok:12345")], [sbatch("--dependency=singleton")]),
    Case(
        "GW708",
        [sbatch("--gpus-per-node=4", "torchrun --nproc_per_node 8 train.py")],
        [sbatch("--gpus-per-node=8", "torchrun --nproc_per_node 8 train.py")],
    ),
    Case(
        "GW709",
        [sbatch("--nodes=4", "srun torchrun --nnodes 2 train.py")],
        [sbatch("--nodes=2", "srun torchrun --nnodes 2 train.py")],
    ),
    Case(
        "GW710",
        [sbatch("--nodes=2 --gpus-per-node=8", "srun accelerate launch --num_processes 8 train.py")],
        [sbatch("--nodes=2 --gpus-per-node=8", "srun accelerate launch --num_processes 16 train.py")],
    ),
    Case(
        "GW711",
        [sbatch("--ntasks-per-node=8", "srun torchrun train.py")],
        [sbatch("--ntasks-per-node=1", "srun torchrun train.py")],
    ),
    Case(
        "GW712",
        [sbatch("--nodes=2", "torchrun --nnodes 2 --rdzv_endpoint $HEAD:29400 train.py")],
        [sbatch("--nodes=2", TORCHRUN)],
    ),
    Case("GW713", [sbatch("--nodes=2", "srun torchrun --nnodes 2 train.py")], [sbatch("--nodes=2", TORCHRUN)]),
    Case(
        "GW714",
        [sbatch("--nodes=1", "export MASTER_PORT=29500")],
        [sbatch("--nodes=1", "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))")],
    ),
    Case(
        "GW715",
        [axolotl(auto_resume_from_checkpoints=True), sbatch("--array=1-6")],
        [axolotl(auto_resume_from_checkpoints=True), sbatch("--array=1-6%1")],
    ),
    Case("GW716", [sbatch("--dependency=afterany:1")], [sbatch("--dependency=afterany:1", "set -euo pipefail")]),
    Case(
        "GW717",
        [sbatch("--nodes=1", "torchrun --nproc_per_node 8 train.py")],
        [sbatch("--nodes=1 --gres=gpu:8", "torchrun --nproc_per_node 8 train.py")],
    ),
    Case(
        "GW718",
        [sbatch("--partition=standard-g --time=3-00:00:00")],
        [sbatch("--partition=standard-g --time=2-00:00:00")],
    ),
    Case(
        "GW719",
        [sbatch("--partition=standard-g --ntasks-per-node=8 --cpus-per-task=8")],
        [sbatch("--partition=standard-g --ntasks-per-node=8 --cpus-per-task=7")],
    ),
    Case("GW720", [sbatch("--partition=standard-g --mem=512G")], [sbatch("--partition=standard-g --mem=480G")]),
    Case(
        "GW721",
        [sbatch("--partition=standard-g --ntasks-per-node=8", "srun python train.py")],
        [sbatch("--partition=standard-g --ntasks-per-node=8", "srun --cpu-bind=$MASKS python train.py")],
    ),
    Case("GW722", [sbatch("--gpus-per-node=8 --ntasks-per-node=1")], [sbatch("--gpus-per-node=8 --exclusive")]),
    # --- environment, caches, quota
    Case(
        "GW751",
        [sbatch("--nodes=1", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True")],
        [sbatch("--nodes=1", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")],
    ),
    Case(
        "GW752",
        [sbatch("--nodes=1", "export PYTORCH_HIP_ALLOC_CONF=expandable_segments:True", "pip install torch==2.10.0")],
        [sbatch("--nodes=1", "export PYTORCH_HIP_ALLOC_CONF=expandable_segments:True", "pip install torch==2.11.0")],
        {"gpu": "mi250x-gcd"},
    ),
    Case(
        "GW753",
        [sbatch("--nodes=1", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")],
        [sbatch("--nodes=1", "export PYTORCH_ALLOC_CONF=expandable_segments:True")],
        {"gpu": "mi250x-gcd"},
    ),
    Case(
        "GW754",
        [sbatch("--nodes=1", "export ROCR_VISIBLE_DEVICES=0,1", "export HIP_VISIBLE_DEVICES=1")],
        [sbatch("--nodes=1", "export ROCR_VISIBLE_DEVICES=0,1")],
    ),
    Case(
        "GW755",
        [sbatch(LUMI2, "export NCCL_SOCKET_IFNAME=hsn0")],
        [sbatch(LUMI2, "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3")],
    ),
    Case("GW756", [sbatch(LUMI2)], [sbatch(LUMI2, "export NCCL_NET_GDR_LEVEL=3")]),
    Case("GW757", [sbatch(LUMI2)], [sbatch(LUMI2, "export FI_MR_CACHE_MONITOR=userfaultfd")]),
    Case(
        "GW758",
        [sbatch("--partition=standard-g", "export MIOPEN_USER_DB_PATH=/scratch/project/miopen")],
        [sbatch("--partition=standard-g", "export MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID")],
    ),
    Case(
        "GW759",
        [sbatch("--nodes=1", "export MIOPEN_USER_DB=/tmp/miopen")],
        [sbatch("--nodes=1", "export MIOPEN_USER_DB_PATH=/tmp/miopen")],
    ),
    Case(
        "GW760",
        [trl(model_name_or_path=MOE), sbatch("--nodes=1")],
        [trl(model_name_or_path=MOE), sbatch("--nodes=1", "export HSA_NO_SCRATCH_RECLAIM=1")],
        {"gpu": "mi300x"},
    ),
    Case(
        "GW761",
        [sbatch("--nodes=1", "python pretrain_gpt.py --tensor-model-parallel-size 2")],
        [
            sbatch(
                "--nodes=1",
                "export CUDA_DEVICE_MAX_CONNECTIONS=1",
                "python pretrain_gpt.py --tensor-model-parallel-size 2",
            )
        ],
    ),
    Case(
        "GW762",
        [trl(attn_implementation="flash_attention_3")],
        [trl(attn_implementation="flash_attention_2")],
        {"gpu": "mi300x"},
    ),
    Case(
        "GW763",
        [trl(attn_implementation="flash_attention_2"), sbatch("--nodes=1")],
        [
            trl(attn_implementation="flash_attention_2"),
            sbatch("--nodes=1", "export FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE"),
        ],
        {"gpu": "mi300x"},
    ),
    Case("GW764", [axolotl(adapter="qlora")], [axolotl(adapter="lora")], {"gpu": "mi250x-gcd"}),
    Case(
        "GW765",
        [megatron("--bf16"), ("env.sh", "pip install flash-attn==2.8.4\n")],
        [megatron("--bf16"), ("env.sh", "pip install flash-attn==2.8.3\n")],
    ),
    Case(
        "GW781",
        [trl(), sbatch("--nodes=1")],
        [trl(), sbatch("--nodes=1", "export HF_HOME=/scratch/project_1/hf")],
    ),
    Case(
        "GW782",
        [sbatch("--nodes=2", "export TRITON_CACHE_DIR=/scratch/triton")],
        [sbatch("--nodes=2", "export TRITON_CACHE_DIR=/tmp/triton-$SLURM_JOB_ID")],
    ),
    Case(
        "GW783",
        [trl(output_dir="$HOME/runs/judge"), sbatch("--nodes=1")],
        [trl(output_dir="/scratch/project_1/runs/judge"), sbatch("--nodes=1")],
    ),
    Case(
        "GW784",
        [axolotl(max_steps=2000, save_steps=100)],
        [axolotl(max_steps=2000, save_steps=100, save_total_limit=2)],
    ),
    # --- later stages
    Case("GW801", [axolotl(rl="dpo", learning_rate=2e-4, **LORA)], [axolotl(rl="dpo", learning_rate=1e-5, **LORA)]),
    Case(
        "GW802",
        [axolotl(base_model="Qwen/Qwen3-8B-Base", rl="dpo")],
        [axolotl(base_model="Qwen/Qwen3-8B", rl="dpo")],
    ),
    Case(
        "GW803",
        [
            axolotl(base_model=MOE, rl="dpo", **LORA, lora_target_parameters=FUSED),
            ("env.sh", "pip install peft==0.19.1\n"),
        ],
        [
            axolotl(base_model=MOE, rl="dpo", **LORA, lora_target_parameters=FUSED),
            ("env.sh", "pip install peft==0.20.0\n"),
        ],
    ),
    Case(
        "GW804",
        [factory(stage="dpo", model_name_or_path="saves/sft", template=None)],
        [factory(stage="dpo", model_name_or_path="saves/sft")],
    ),
    Case(
        "GW805",
        [swift("--rlhf_type gkd --teacher_model Qwen/Qwen2.5-72B", verb="rlhf")],
        [swift("--rlhf_type gkd --teacher_model Qwen/Qwen2.5-72B --teacher_deepspeed zero3", verb="rlhf")],
        {"gpu": "h100-sxm"},
    ),
    Case(
        "GW806",
        [swift("--rlhf_type gkd --teacher_model meta-llama/Llama-3.1-70B", verb="rlhf")],
        [swift("--rlhf_type gkd --teacher_model Qwen/Qwen3-30B-A3B", verb="rlhf")],
    ),
    Case(
        "GW851",
        [factory(export_dir="merged", adapter_name_or_path="saves/run", quantization_bit=4)],
        [factory(export_dir="merged", adapter_name_or_path="saves/run")],
    ),
    Case(
        "GW852",
        [
            factory(export_dir="merged", adapter_name_or_path="a", model_name_or_path="Qwen/Qwen2.5-72B"),
            sbatch("--mem=100G"),
        ],
        [
            factory(export_dir="merged", adapter_name_or_path="a", model_name_or_path="Qwen/Qwen2.5-72B"),
            sbatch("--mem=480G"),
        ],
    ),
    Case(
        "GW853",
        [
            axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED),
            ("x.sh", "python convert_lora_to_gguf.py adapter\n"),
        ],
        [axolotl(base_model=MOE, **LORA), ("x.sh", "python convert_lora_to_gguf.py adapter\n")],
    ),
    Case(
        "GW854",
        [axolotl(base_model="Qwen/Qwen3-Next-80B-A3B-Instruct"), ("x.sh", "python convert_hf_to_gguf.py merged\n")],
        [
            axolotl(base_model="Qwen/Qwen3-Next-80B-A3B-Instruct"),
            ("x.sh", "python convert_hf_to_gguf.py merged --no-nextn\n"),
        ],
    ),
    Case(
        "GW855",
        [("x.sh", "python convert_hf_to_gguf.py models/Qwen3-8B-GPTQ-Int4\n")],
        [("x.sh", "python convert_hf_to_gguf.py models/Qwen3-8B\n")],
    ),
    Case(
        "GW856",
        [factory(export_dir="merged", adapter_name_or_path="a", model_name_or_path="Qwen/Qwen3-235B-A22B-FP8")],
        [factory(export_dir="merged", adapter_name_or_path="a", model_name_or_path="Qwen/Qwen3-235B-A22B")],
    ),
    Case("GW857", [axolotl(save_safetensors=False)], [axolotl(save_safetensors=True)]),
    Case(
        "GW858",
        [axolotl(base_model="Qwen/Qwen2.5-0.5B"), ("x.sh", "llama-quantize in.gguf out.gguf Q4_K_M\n")],
        [axolotl(base_model=DENSE), ("x.sh", "llama-quantize in.gguf out.gguf Q4_K_M\n")],
    ),
)
