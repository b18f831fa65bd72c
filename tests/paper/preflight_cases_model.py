"""For each rule of GW3xx to GW4xx a config that breaks it and one that does not."""

from preflight_case import Case
from preflight_texts import (
    DENSE,
    MOE,
    axolotl,
    deepspeed,
    factory,
    megatron,
    ours,
    sbatch,
    trainer,
    trl,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GLM = "GLM-4.5-Air"
LORA = {"adapter": "lora", "lora_r": 16, "lora_dropout": 0.0}
PEFT = {"use_peft": True, "lora_r": 16}

CASES = (
    Case(
        "GW301",
        [factory(model_name_or_path=MOE, lora_target="all")],
        [factory(model_name_or_path=MOE, lora_target="q_proj,k_proj,v_proj,o_proj")],
    ),
    Case(
        "GW302",
        [trl(model_name_or_path=MOE, **PEFT, lora_target_modules="all-linear")],
        [trl(model_name_or_path=MOE, **PEFT, lora_target_modules=ATTENTION)],
    ),
    Case(
        "GW303",
        [axolotl(base_model=MOE, **LORA, lora_target_modules=[*ATTENTION, "gate"])],
        [axolotl(base_model=MOE, **LORA, lora_target_modules=ATTENTION)],
    ),
    Case(
        "GW304",
        [axolotl(base_model=MOE, **{**LORA, "lora_dropout": 0.05}, lora_target_parameters=FUSED)],
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED)],
    ),
    Case(
        "GW305",
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED, peft_use_dora=True)],
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED)],
    ),
    Case(
        "GW306",
        [axolotl(base_model=MOE, **LORA, lora_target_modules=["q_proj", "up_proj"])],
        [axolotl(base_model=MOE, **LORA, lora_target_modules=["q_proj", "up_proj", "gate_proj"])],
    ),
    Case(
        "GW307",
        [axolotl(base_model=MOE, **LORA, lora_target_modules=[r"experts\.\d+\.up_proj"])],
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED)],
    ),
    Case(
        "GW308",
        [axolotl(**LORA, lora_target_modules=["q_proj", "query_key_value"])],
        [axolotl(**LORA, lora_target_modules=["q_proj", "v_proj"])],
    ),
    Case(
        "GW309",
        [axolotl(**LORA, lora_rank_pattern={"c_attn": 4})],
        [axolotl(**LORA, lora_rank_pattern={"q_proj": 4})],
    ),
    Case(
        "GW310",
        [axolotl(base_model=MOE, adapter="qlora", load_in_4bit=True)],
        [axolotl(base_model=MOE, adapter="qlora", load_in_4bit=True, quantize_moe_experts=True)],
    ),
    Case(
        "GW311",
        [axolotl(base_model=MOE, adapter="qlora", quantize_moe_experts=True)],
        [axolotl(base_model=MOE, adapter="lora")],
        {"gpu": "mi300x"},
    ),
    Case(
        "GW312",
        [axolotl(base_model=MOE, adapter="qlora", quantize_moe_experts=True, deepspeed="ds.json"), deepspeed()],
        [axolotl(base_model=MOE, adapter="qlora", quantize_moe_experts=True)],
    ),
    Case(
        "GW313",
        [axolotl(base_model="Qwen/Qwen2.5-0.5B", **LORA, lora_target_modules=["q_proj", "lm_head"])],
        [axolotl(base_model=DENSE, **LORA, lora_target_modules=["q_proj", "lm_head"])],
    ),
    Case(
        "GW314",
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED, gradient_checkpointing=False)],
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED, gradient_checkpointing=True)],
    ),
    Case("GW315", [axolotl(experts_implementation="batched_mm")], [axolotl(experts_implementation="grouped_mm")]),
    Case(
        "GW316",
        [axolotl(base_model=MOE, experts_implementation="eager")],
        [axolotl(base_model=MOE, experts_implementation="grouped_mm")],
    ),
    Case(
        "GW317",
        [axolotl(base_model=MOE, **{**LORA, "lora_r": 32}, lora_target_parameters=FUSED)],
        [axolotl(base_model=MOE, **LORA, lora_target_modules=ATTENTION)],
    ),
    Case(
        "GW318",
        [
            trl(model_name_or_path=MOE, **PEFT, lora_target_modules="all-linear"),
            sbatch("--nodes=1", "pip install peft==0.19.1"),
        ],
        [
            trl(model_name_or_path=MOE, **PEFT, lora_target_modules="all-linear"),
            sbatch("--nodes=1", "pip install peft==0.21.2"),
        ],
    ),
    Case(
        "GW319",
        [axolotl(base_model=MOE, **LORA, lora_target_modules=ATTENTION)],
        [axolotl(base_model=MOE, **LORA, lora_target_modules=ATTENTION, lora_target_parameters=FUSED)],
    ),
    Case(
        "GW320",
        [axolotl(base_model=MOE, **{**LORA, "lora_r": 12}, lora_target_parameters=FUSED)],
        [axolotl(base_model=MOE, **LORA, lora_target_parameters=FUSED)],
    ),
    # --- the router
    Case(
        "GW351",
        [factory(model_name_or_path=MOE, finetuning_type="full")],
        [factory(model_name_or_path=MOE, finetuning_type="full", moe_aux_loss_coef=0.001)],
    ),
    Case("GW352", [factory(moe_aux_loss_coef=0.9)], [factory(moe_aux_loss_coef=0.001)]),
    Case(
        "GW353",
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001, gradient_accumulation_steps=8)],
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001, gradient_accumulation_steps=1)],
    ),
    Case(
        "GW354",
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001)],
        [factory(model_name_or_path=DENSE, moe_aux_loss_coef=0.001)],
    ),
    Case(
        "GW355",
        [factory(model_name_or_path=GLM, moe_aux_loss_coef=0.001)],
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001)],
    ),
    Case(
        "GW356",
        [factory(model_name_or_path=GLM, finetuning_type="full")],
        [factory(model_name_or_path=GLM, finetuning_type="lora")],
    ),
    Case(
        "GW357",
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001, use_reentrant_gc=True)],
        [factory(model_name_or_path=MOE, moe_aux_loss_coef=0.001, use_reentrant_gc=False)],
    ),
    Case("GW358", [megatron("--moe-router-force-load-balancing")], [megatron("--bf16")]),
    Case("GW359", [megatron("--moe-expert-capacity-factor 1.25")], [megatron("--bf16")]),
    Case(
        "GW360",
        [megatron("--expert-model-parallel-size 8")],
        [megatron("--expert-model-parallel-size 8 --moe-router-dtype fp32")],
    ),
    Case(
        "GW361",
        [ours(router={"train": True})],
        [ours(router={"train": True, "balance": 0.001, "z": 0.001})],
    ),
    Case(
        "GW362",
        [trl(beta=0.1, router_aux_loss_coef=0.001, deepspeed="ds.json"), deepspeed()],
        [trl(beta=0.1, router_aux_loss_coef=0.001)],
    ),
    Case(
        "GW363",
        [("grpo.sh", f"trl grpo --model_name_or_path {MOE} --output_dir out\n")],
        [("grpo.sh", f"trl grpo --model_name_or_path {MOE} --output_dir out --router_aux_loss_coef 0\n")],
    ),
    Case(
        "GW364",
        [factory(neat_packing=True, flash_attn="sdpa", moe_aux_loss_coef=0.001)],
        [factory(neat_packing=True, flash_attn="fa2", moe_aux_loss_coef=0.001)],
    ),
    # --- memory
    Case(
        "GW401",
        [axolotl(base_model=DENSE, sample_packing=True, micro_batch_size=1)],
        [axolotl(base_model=DENSE, sample_packing=True, micro_batch_size=1, **LORA)],
        {"gpu": "h100-sxm", "gpus": 1},
    ),
    Case(
        "GW402",
        [axolotl(**LORA, sequence_len=65536, micro_batch_size=4)],
        [axolotl(**LORA, sequence_len=2048, micro_batch_size=1)],
        {"gpu": "h100-sxm", "gpus": 1},
    ),
    Case(
        "GW403",
        [axolotl(**LORA, sample_packing=True, gradient_checkpointing=True, sequence_len=20480, micro_batch_size=1)],
        [axolotl(**LORA, sample_packing=True, gradient_checkpointing=True, sequence_len=2048, micro_batch_size=1)],
        {"gpu": "h100-sxm", "gpus": 1},
    ),
    Case(
        "GW404",
        [axolotl(**LORA, sample_packing=True, gradient_checkpointing=True, micro_batch_size=1, sequence_len=16384)],
        [axolotl(**LORA, sample_packing=True, gradient_checkpointing=True, micro_batch_size=1, cut_cross_entropy=True)],
        {"gpu": "h200", "gpus": 1},
    ),
    Case("GW405", [axolotl(attn_implementation="eager", sequence_len=8192)], [axolotl(sequence_len=8192)]),
    Case(
        "GW406",
        [trl(eval_strategy="steps", per_device_train_batch_size=1)],
        [trl(eval_strategy="steps", per_device_train_batch_size=1, per_device_eval_batch_size=1)],
    ),
    Case("GW407", [trainer(eval_accumulation_steps=4)], [trainer(eval_accumulation_steps=None)]),
    Case(
        "GW408",
        [
            axolotl(deepspeed="ds.json"),
            deepspeed(2, zero={"offload_optimizer": {"device": "cpu"}}),
            sbatch("--mem=64G"),
        ],
        [
            axolotl(deepspeed="ds.json"),
            deepspeed(2, zero={"offload_optimizer": {"device": "cpu"}}),
            sbatch("--mem=480G"),
        ],
    ),
    Case(
        "GW409",
        [axolotl(base_model="deepseek-ai/DeepSeek-V3")],
        [axolotl(base_model="deepseek-ai/DeepSeek-V3", **LORA)],
    ),
    # --- batch, schedule, precision
    Case(
        "GW421",
        [deepspeed(2, train_batch_size=64, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)],
        [deepspeed(2, train_batch_size=32, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4)],
        {"gpus": 8},
    ),
    Case(
        "GW422",
        [trl(learning_rate=1e-4, deepspeed="ds.json"), deepspeed(2, optimizer={"params": {"lr": 2e-5}})],
        [trl(learning_rate=1e-4, deepspeed="ds.json"), deepspeed(2, optimizer={"params": {"lr": "auto"}})],
    ),
    Case(
        "GW423",
        [megatron("--global-batch-size 100")],
        [megatron("--global-batch-size 128")],
        {"gpus": 8},
    ),
    Case("GW424", [axolotl(context_parallel_size=4)], [axolotl(context_parallel_size=1)], {"gpus": 8}),
    Case("GW425", [trainer(max_steps=100, num_train_epochs=3)], [trainer(num_train_epochs=3)]),
    Case("GW426", [axolotl(max_steps=100, warmup_steps=200)], [axolotl(max_steps=1000, warmup_steps=20)]),
    Case("GW427", [axolotl(warmup_steps=10, warmup_ratio=0.1)], [axolotl(warmup_ratio=0.1)]),
    Case(
        "GW428",
        [axolotl(batch_size=64, gradient_accumulation_steps=4)],
        [axolotl(gradient_accumulation_steps=4)],
    ),
    Case("GW429", [axolotl(save_steps=100, saves_per_epoch=2)], [axolotl(saves_per_epoch=2)]),
    Case("GW430", [axolotl(eval_steps=100, evals_per_epoch=2)], [axolotl(eval_steps=100)]),
    Case("GW441", [trainer(fp16=True)], [trainer(bf16=True)], {"gpu": "mi250x-gcd"}),
    Case("GW442", [axolotl(fp16=True, bf16=True)], [axolotl(bf16=True)]),
    Case(
        "GW443",
        [factory(pure_bf16=True, finetuning_type="full")],
        [factory(pure_bf16=True, finetuning_type="lora")],
    ),
    Case("GW444", [axolotl(fp8=True)], [axolotl(bf16=True)], {"gpu": "mi250x-gcd"}),
    Case("GW445", [trainer(fp16=True)], [trainer(fp16=True, logging_nan_inf_filter=False)]),
)
