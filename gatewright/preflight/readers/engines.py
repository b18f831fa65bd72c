"""Configs of the engines below a trainer: DeepSpeed's JSON, accelerate's YAML, an FSDP section in a file of its own."""

from gatewright.preflight.job import Written
from gatewright.preflight.options import accelerate, deepspeed
from gatewright.preflight.reading import Reading, Table, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

DEEPSPEED: Table = {
    "train_batch_size": ("global_batch", whole),
    "train_micro_batch_size_per_gpu": ("micro_batch", whole),
    "gradient_accumulation_steps": ("accumulation", whole),
    "gradient_clipping": ("clip_norm", number),
    "fp16.enabled": ("fp16", flag),
    "bf16.enabled": ("bf16", flag),
    "bf16.bf16_optimizer_states": ("bf16_states", flag),
    "data_types.bf16_optimizer_states": ("bf16_states", flag),
    "optimizer.params.lr": ("lr", number),
    "zero_optimization.stage": ("zero", whole),
    "zero_optimization.leaf_module.classes": ("leaf_modules", words),
    "zero_optimization.offload_optimizer.device": ("offload_optimizer", word),
    "zero_optimization.offload_param.device": ("offload_params", word),
    "zero_optimization.zero_hpz_partition_size": ("hpz", whole),
    "zero_optimization.zero_quantized_gradients": ("quantized_gradients", flag),
    "expert_parallel.enabled": ("auto_ep", flag),
    "expert_parallel.autoep_size": ("ep", whole),
    "tensor_parallel.autotp_size": ("tp", whole),
    "sequence_parallel_size": ("cp", whole),
}
ACCELERATE: Table = {
    "num_processes": ("ranks", whole),
    "num_machines": ("launcher_nodes", whole),
    "main_process_port": ("launcher_port", word),
    "deepspeed_config.zero_stage": ("zero", whole),
    "deepspeed_config.gradient_accumulation_steps": ("accumulation", whole),
    "deepspeed_config.gradient_clipping": ("clip_norm", number),
    "deepspeed_config.offload_optimizer_device": ("offload_optimizer", word),
    "deepspeed_config.offload_param_device": ("offload_params", word),
    "deepspeed_config.deepspeed_moe_layer_cls_names": ("leaf_modules", words),
    "fsdp_config.fsdp_version": ("fsdp_version", whole),
    "fsdp_config.fsdp_state_dict_type": ("fsdp_state_dict", word),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "fsdp_config.fsdp_sync_module_states": ("fsdp_sync", flag),
    "fsdp_config.fsdp_activation_checkpointing": ("checkpointing", flag),
    "parallelism_config.parallelism_config_tp_size": ("tp", whole),
    "parallelism_config.parallelism_config_cp_size": ("cp", whole),
}
FSDP: Table = {
    "fsdp_version": ("fsdp_version", whole),
    "version": ("fsdp_version", whole),
    "state_dict_type": ("fsdp_state_dict", word),
    "fsdp_state_dict_type": ("fsdp_state_dict", word),
    "cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "fsdp_cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "sync_module_states": ("fsdp_sync", flag),
    "fsdp_sync_module_states": ("fsdp_sync", flag),
    "activation_checkpointing": ("checkpointing", flag),
}
FSDP_NAMES_TEXT = """
fsdp_version version state_dict_type cpu_ram_efficient_loading sync_module_states activation_checkpointing
auto_wrap_policy transformer_layer_cls_to_wrap min_num_params reshard_after_forward backward_prefetch
forward_prefetch limit_all_gathers use_orig_params sharding_strategy offload_params cpu_offload
mixed_precision_policy xla xla_fsdp_settings xla_fsdp_grad_ckpt final_state_dict_type cpu_offload_pin_memory
"""
FSDP_NAMES = frozenset(FSDP_NAMES_TEXT.split())


def read_deepspeed(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("deepspeed", file)
    understand(reading, leaves, table=DEEPSPEED, known=deepspeed.NAMES)
    reading.values["backend"] = Written("deepspeed", "zero_optimization", file, leaves[0].line if leaves else 0)
    reading.values.setdefault("zero", Written(0, "zero_optimization.stage", file, default=True))
    return reading


def read_accelerate(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("accelerate", file)
    understand(reading, leaves, table=ACCELERATE, known=accelerate.NAMES)
    for leaf in leaves:
        text = str(leaf.value)
        if leaf.key == "distributed_type":
            if text == "DEEPSPEED":
                reading.put("backend", "deepspeed", leaf)
            elif text == "FSDP":
                reading.put("fsdp", True, leaf)
            elif text.startswith("MULTI_"):
                reading.put("backend", "ddp", leaf)
        elif leaf.key == "mixed_precision" and text in ("bf16", "fp16", "fp8"):
            reading.put(text, "accelerate" if text == "fp8" else True, leaf)
        elif leaf.key == "deepspeed_config.deepspeed_config_file":
            reading.names.append(Written(text, leaf.key, file, leaf.line))
    return reading


def read_fsdp(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("fsdp", file)
    known = FSDP_NAMES | {f"fsdp_{name}" for name in FSDP_NAMES}
    understand(reading, leaves, table=FSDP, known=known)
    reading.values["fsdp"] = Written(True, "fsdp_config", file, leaves[0].line if leaves else 0)
    return reading
