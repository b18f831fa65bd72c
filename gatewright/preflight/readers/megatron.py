"""Megatron-LM's arguments, from a command line or a YAML of the same names."""

from gatewright.preflight.job import Written
from gatewright.preflight.options.megatron import NAMES
from gatewright.preflight.reading import Reading, Table, attention, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

TABLE: Table = {
    "save": ("output_dir", word),
    "save_interval": ("save_steps", whole),
    "no_save_optim": ("save_only_model", flag),
    "no_load_optim": ("load_only_model", flag),
    "finetune": ("load_only_model", flag),
    "micro_batch_size": ("micro_batch", whole),
    "global_batch_size": ("global_batch", whole),
    "seq_length": ("max_tokens", whole),
    "train_iters": ("max_steps", whole),
    "lr": ("lr", number),
    "lr_warmup_iters": ("warmup_steps", whole),
    "lr_warmup_fraction": ("warmup_ratio", number),
    "clip_grad": ("clip_norm", number),
    "fp16": ("fp16", flag),
    "bf16": ("bf16", flag),
    "fp8_format": ("fp8", word),
    "attention_backend": ("attention", attention),
    "tensor_model_parallel_size": ("tp", whole),
    "pipeline_model_parallel_size": ("pp", whole),
    "context_parallel_size": ("cp", whole),
    "expert_model_parallel_size": ("ep", whole),
    "expert_tensor_parallel_size": ("etp", whole),
    "sequence_parallel": ("sequence_parallel", flag),
    "hybrid_context_parallel": ("dynamic_cp", flag),
    "calculate_per_token_loss": ("per_token_loss", flag),
    "moe_aux_loss_coeff": ("aux", number),
    "moe_z_loss_coeff": ("z", number),
    "moe_expert_capacity_factor": ("capacity", number),
    "moe_router_force_load_balancing": ("force_balance", flag),
    "moe_router_dtype": ("router_dtype", word),
    "moe_flex_dispatcher_backend": ("dispatcher", word),
    "exp_avg_dtype": ("state_dtype", word),
    "main_params_dtype": ("state_dtype", word),
    "pretrained_checkpoint": ("model", word),
    "target_modules": ("lora_targets", words),
}
_DYNAMIC = "default_dynamic_cp"


def read_megatron(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("megatron", file)
    understand(reading, leaves, table=TABLE, known=NAMES)
    values = reading.values
    values["backend"] = Written("megatron", "megatron", file, default=True)
    for leaf in leaves:
        on = str(leaf.value).lower() not in ("false", "none", "")
        if leaf.key in ("recompute_granularity", "recompute_activations"):
            reading.put("checkpointing", on, leaf)
        elif leaf.key == "moe_enable_deepep" and on:
            reading.put("dispatcher", "deepep", leaf)
        elif leaf.key == "sequence_packing_scheduler" and leaf.value == _DYNAMIC:
            reading.put("dynamic_cp", True, leaf)
        elif leaf.key == "sft" and on:
            reading.put("task", "sft", leaf)
    values.setdefault("adapter", Written("full", "megatron", file, default=True))
    values.setdefault("task", Written("pretrain", "megatron", file, default=True))
    states(reading)
    return reading


def states(reading: Reading) -> None:
    """exp_avg_dtype and main_params_dtype say how the optimizer keeps its state."""
    said = reading.values.pop("state_dtype", None)
    if said is not None and str(said.value) in ("bf16", "fp16"):
        reading.values["bf16_states"] = Written(True, said.key, said.file, said.line)
