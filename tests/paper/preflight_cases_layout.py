"""For each rule of GW0xx to GW2xx a config that breaks it and one that does not."""

from preflight_case import Case
from preflight_texts import (
    DENSE,
    MOE,
    accelerate,
    axolotl,
    deepspeed,
    factory,
    megatron,
    megatron_swift,
    ours,
    sbatch,
    swift,
    trainer,
    trl,
)

EP4 = axolotl(base_model=MOE, expert_parallel_size=4, deepspeed="ds.json")
LATENT = "DeepSeek-V2-Lite"

CASES = (
    Case("GW001", [("empty.yaml", "\n")], [axolotl()]),
    Case("GW002", [("twice.yaml", axolotl()[1] + "sequence_len: 8192\n")], [axolotl()]),
    Case("GW003", [axolotl(deepspeed="elsewhere/zero2.json")], [axolotl(deepspeed="ds.json"), deepspeed()]),
    Case("GW004", [ours(train={"stepz": 5})], [ours()]),
    Case("GW005", [axolotl(sequence_length_=1, micro_batch_sise=1)], [axolotl(micro_batch_size=1)]),
    Case("GW101", [EP4, deepspeed(3)], [EP4, deepspeed(2)], {"gpus": 8}),
    Case(
        "GW102",
        [
            axolotl(base_model=MOE, tensor_parallel_size=2),
            deepspeed(3, expert_parallel={"enabled": True, "autoep_size": 4}),
        ],
        [axolotl(base_model=MOE), deepspeed(3, expert_parallel={"enabled": True, "autoep_size": 4})],
        {"gpus": 8},
    ),
    Case(
        "GW103",
        [megatron_swift("--tensor_model_parallel_size 3")],
        [megatron_swift("--tensor_model_parallel_size 2")],
        {"gpus": 8},
    ),
    Case("GW104", [axolotl(expert_parallel_size=4)], [axolotl(base_model=MOE, expert_parallel_size=4)], {"gpus": 8}),
    Case("GW105", [axolotl(base_model=MOE, expert_parallel_size=3)], [EP4, deepspeed()], {"gpus": 12}),
    Case(
        "GW106",
        [axolotl(base_model=MOE, expert_parallel_size=8)],
        [axolotl(base_model=MOE, expert_parallel_size=4)],
        {"gpus": 4},
    ),
    Case(
        "GW107",
        [
            axolotl(
                base_model=MOE,
                expert_parallel_size=4,
                fsdp_version=1,
                fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
            )
        ],
        [
            axolotl(
                base_model=MOE,
                expert_parallel_size=4,
                fsdp_version=2,
                fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
            )
        ],
        {"gpus": 8},
    ),
    Case(
        "GW108",
        [megatron_swift("--tensor_model_parallel_size 3", model=DENSE)],
        [megatron_swift("--tensor_model_parallel_size 4")],
        {"gpus": 12},
    ),
    Case(
        "GW109",
        [megatron_swift("--tensor_model_parallel_size 16")],
        [megatron_swift("--tensor_model_parallel_size 4")],
        {"gpus": 16, "gpu": "h200"},
    ),
    Case(
        "GW110",
        [megatron_swift("--expert_tensor_parallel_size 2 --tensor_model_parallel_size 2")],
        [megatron_swift("--expert_tensor_parallel_size 1 --tensor_model_parallel_size 2")],
        {"gpus": 8, "gpu": "h200"},
    ),
    Case(
        "GW111",
        [megatron_swift("--pipeline_model_parallel_size 64")],
        [megatron_swift("--pipeline_model_parallel_size 4")],
        {"gpus": 64},
    ),
    Case(
        "GW112",
        [megatron_swift("--pipeline_model_parallel_size 4 --global_batch_size 4 --micro_batch_size 1")],
        [megatron_swift("--pipeline_model_parallel_size 4 --global_batch_size 64 --micro_batch_size 1")],
        {"gpus": 8},
    ),
    Case(
        "GW113",
        [factory(pipeline_model_parallel_size=2, deepspeed="ds.json"), deepspeed(2)],
        [factory(deepspeed="ds.json"), deepspeed(2)],
        {"gpus": 8},
    ),
    Case(
        "GW116",
        [axolotl(context_parallel_size=32, sequence_len=2048)],
        [axolotl(context_parallel_size=4)],
        {"gpus": 32},
    ),
    Case(
        "GW117",
        [axolotl(context_parallel_size=4, attn_implementation="eager")],
        [axolotl(context_parallel_size=4)],
        {"gpus": 8},
    ),
    Case("GW118", [axolotl(load_in_8bit=True)], [axolotl(load_in_8bit=True, adapter="lora", lora_r=8)], {"gpus": 1}),
    Case(
        "GW119",
        [axolotl(fsdp_version=2, fsdp_config={"reshard_after_forward": True}, optimizer="adamw_bnb_8bit")],
        [axolotl(fsdp_version=2, fsdp_config={"reshard_after_forward": True}, optimizer="adamw_torch_fused")],
        {"gpus": 8},
    ),
    Case(
        "GW126",
        [ours(model={"path": "Qwen3-Next-80B-A3B-Instruct"}, parallel={"cp": 2})],
        [ours(model={"path": MOE}, parallel={"cp": 2})],
        {"gpus": 8, "gpu": "h200"},
    ),
    Case(
        "GW120",
        [axolotl(adapter="qlora", fsdp_version=2, fsdp_config={"reshard_after_forward": True})],
        [axolotl(adapter="lora", fsdp_version=2, fsdp_config={"reshard_after_forward": True})],
        {"gpus": 8},
    ),
    Case(
        "GW121",
        [axolotl(base_model="deepseek-ai/DeepSeek-V3", adapter="lora")],
        [axolotl(base_model=MOE, adapter="lora")],
        {"gpus": 8, "gpu": "mi250x-gcd"},
    ),
    Case(
        "GW122",
        [megatron_swift("--expert_model_parallel_size 16")],
        [megatron_swift("--expert_model_parallel_size 8")],
        {"gpus": 16, "gpu": "h200"},
    ),
    Case(
        "GW123",
        [megatron_swift("--expert_model_parallel_size 4 --tuner_type lora --max_length 65536 --micro_batch_size 1")],
        [megatron_swift("--expert_model_parallel_size 4 --tuner_type lora --max_length 4096 --micro_batch_size 1")],
        {"gpus": 8, "gpu": "h200"},
    ),
    Case(
        "GW124",
        [axolotl(adapter="lora", deepspeed="ds.json"), deepspeed(2)],
        [axolotl(adapter="lora", deepspeed="ds.json"), deepspeed(3)],
        {"gpus": 8},
    ),
    Case(
        "GW125",
        [axolotl(base_model="Qwen/Qwen2.5-32B", deepspeed="ds.json"), deepspeed(2)],
        [axolotl(base_model="Qwen/Qwen2.5-32B", deepspeed="ds.json"), deepspeed(3)],
        {"gpus": 8, "gpu": "mi250x-gcd"},
    ),
    Case(
        "GW128",
        [ours(model={"path": "google/gemma-2-9b"}, parallel={"cp": 2})],
        [ours(model={"path": "google/gemma-2-9b"}, parallel={"ep": 1})],
        {"gpus": 8},
    ),
    Case(
        "GW131",
        [axolotl(fsdp_version=2, fsdp_config={"version": 2}, deepspeed="ds.json")],
        [axolotl(deepspeed="ds.json")],
    ),
    Case(
        "GW132",
        [trl(model_name_or_path=MOE, deepspeed="ds.json"), deepspeed(3)],
        [
            trl(model_name_or_path=MOE, deepspeed="ds.json"),
            deepspeed(3, zero={"leaf_module": {"classes": ["Qwen3MoeSparseMoeBlock"]}}),
        ],
    ),
    Case(
        "GW133",
        [factory(deepspeed="ds.json"), deepspeed(3)],
        [factory(deepspeed="ds.json"), deepspeed(2)],
    ),
    Case(
        "GW135",
        [axolotl(adapter="lora", fsdp_version=2, fsdp_config={"state_dict_type": "FULL_STATE_DICT"})],
        [axolotl(adapter="lora", fsdp_version=2, fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"})],
    ),
    Case(
        "GW136",
        [axolotl(base_model=MOE, expert_parallel_size=4, tensor_parallel_size=2)],
        [axolotl(base_model=MOE, expert_parallel_size=4, tensor_parallel_size=1)],
    ),
    Case("GW137", [axolotl(base_model=MOE, expert_parallel_size=4)], [axolotl(base_model=MOE)], {"gpu": "mi300x"}),
    Case(
        "GW138",
        [megatron("--expert-model-parallel-size 16 --moe-flex-dispatcher-backend deepep")],
        [megatron("--expert-model-parallel-size 16 --moe-flex-dispatcher-backend hybridep")],
    ),
    Case(
        "GW139",
        [megatron_swift("--tensor_model_parallel_size 4")],
        [megatron_swift("--tensor_model_parallel_size 4 --expert_model_parallel_size 4")],
    ),
    Case(
        "GW140",
        [megatron("--hybrid-context-parallel --pipeline-model-parallel-size 2 --calculate-per-token-loss")],
        [megatron("--hybrid-context-parallel --pipeline-model-parallel-size 1 --calculate-per-token-loss")],
    ),
    Case(
        "GW141",
        [megatron("--hybrid-context-parallel")],
        [megatron("--hybrid-context-parallel --calculate-per-token-loss")],
    ),
    Case(
        "GW142",
        [megatron_swift("--sequence_packing_scheduler default_dynamic_cp", model=LATENT)],
        [megatron_swift("--sequence_packing_scheduler default_dynamic_cp")],
    ),
    Case(
        "GW143",
        [factory(model_name_or_path=MOE, ddp_find_unused_parameters=False)],
        [factory(model_name_or_path=MOE, ddp_find_unused_parameters=True)],
        {"gpus": 8},
    ),
    Case("GW144", [factory(use_mca=True)], [factory(use_mca=True, finetuning_type="full")]),
    Case(
        "GW145",
        [factory(model_name_or_path=MOE, use_mca=True, finetuning_type="full", expert_model_parallel_size=4)],
        [factory(model_name_or_path=MOE, use_mca=True, finetuning_type="full", expert_model_parallel_size=1)],
    ),
    Case(
        "GW146",
        [accelerate(fsdp_config={"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": False})],
        [accelerate(fsdp_config={"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True})],
    ),
    Case(
        "GW147",
        [swift(f"--model {MOE} --tuner_type full --deepspeed zero3")],
        [swift(f"--model {MOE} --tuner_type lora --deepspeed zero3")],
        {"gpus": 16},
    ),
    # --- checkpoints and resume
    Case("GW201", [trl(output_dir="outputs/$SLURM_JOB_ID")], [trl(output_dir="outputs/judge")]),
    Case("GW202", [trl(save_strategy="no"), sbatch("--time=24:00:00")], [trl(), sbatch("--time=24:00:00")]),
    Case(
        "GW203", [trl(), sbatch("--time=12:00:00")], [trl(save_steps=100), sbatch("--time=12:00:00")], {"step_s": 125.0}
    ),
    Case(
        "GW204",
        [trl(save_steps=300), sbatch("--time=12:00:00")],
        [trl(save_steps=100), sbatch("--time=12:00:00")],
        {"step_s": 125.0},
    ),
    Case("GW205", [axolotl(max_steps=300, save_steps=500)], [axolotl(max_steps=300, save_steps=100)]),
    Case("GW206", [axolotl(save_total_limit=1)], [axolotl(save_total_limit=2)]),
    Case("GW207", [axolotl(save_only_model=True, resume_from_checkpoint="x")], [axolotl(save_only_model=True)]),
    Case(
        "GW208",
        [megatron_swift("--no_load_optim true"), sbatch("--array=1-4%1")],
        [megatron_swift("--no_load_optim true"), sbatch("--nodes=1")],
    ),
    Case("GW209", [trl(resume_from_checkpoint=True), sbatch("--requeue")], [trl(resume_from_checkpoint=True)]),
    Case(
        "GW210",
        [factory(overwrite_output_dir=True), sbatch("--dependency=singleton")],
        [factory(overwrite_output_dir=False), sbatch("--dependency=singleton")],
    ),
    Case(
        "GW211",
        [axolotl(), sbatch("--array=1-6%1")],
        [axolotl(auto_resume_from_checkpoints=True), sbatch("--array=1-6%1")],
    ),
    Case("GW212", [axolotl(gradient_checkpointing=False)], [axolotl(gradient_checkpointing=True)]),
    Case(
        "GW213",
        [trainer(load_best_model_at_end=True, eval_strategy="steps", eval_steps=200, save_steps=300)],
        [trainer(load_best_model_at_end=True, eval_strategy="steps", eval_steps=200, save_steps=400)],
    ),
    Case(
        "GW214",
        [trainer(enable_jit_checkpoint=True), sbatch("--nodes=1")],
        [trainer(enable_jit_checkpoint=False), sbatch("--nodes=1")],
    ),
    Case(
        "GW215",
        [axolotl(base_model="Qwen/Qwen2.5-32B", fsdp_version=2, fsdp_config={"state_dict_type": "FULL_STATE_DICT"})],
        [axolotl(base_model=DENSE, fsdp_version=2, fsdp_config={"state_dict_type": "FULL_STATE_DICT"})],
    ),
    Case("GW216", [trainer(ignore_data_skip=True, resume_from_checkpoint="x")], [trainer(resume_from_checkpoint="x")]),
)
