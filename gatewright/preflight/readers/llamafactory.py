"""LLaMA-Factory's YAML, and the same arguments on its command line."""

from gatewright.preflight.job import Written
from gatewright.preflight.options import huggingface, llamafactory
from gatewright.preflight.readers.huggingface import TRAINER, TRAINER_DEFAULTS, finish
from gatewright.preflight.reading import Reading, Table, attention, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

TABLE: Table = {
    **TRAINER,
    "adapter_name_or_path": ("adapter_path", word),
    "stage": ("task", word),
    "finetuning_type": ("adapter", word),
    "lora_rank": ("lora_rank", whole),
    "lora_dropout": ("lora_dropout", number),
    "lora_target": ("lora_targets", words),
    "additional_target": ("lora_modules_to_save", words),
    "use_dora": ("lora_dora", flag),
    "quantization_bit": ("bits", whole),
    "flash_attn": ("attention", attention),
    "enable_liger_kernel": ("liger", flag),
    "pure_bf16": ("bf16_states", flag),
    "cutoff_len": ("max_tokens", whole),
    "packing": ("packing", flag),
    "neat_packing": ("isolated", flag),
    "template": ("template", word),
    "train_on_prompt": ("train_on_prompt", flag),
    "resize_vocab": ("resize_vocab", flag),
    "add_tokens": ("new_tokens", words),
    "add_special_tokens": ("new_tokens", words),
    "moe_aux_loss_coef": ("aux", number),
    "disable_gradient_checkpointing": ("no_checkpointing", flag),
    "use_reentrant_gc": ("reentrant", flag),
    "use_mca": ("mca", flag),
    "pref_beta": ("beta", number),
    "export_dir": ("export_dir", word),
    "export_quantization_bit": ("export_quant", word),
    "export_legacy_format": ("export_legacy", flag),
    "tensor_model_parallel_size": ("tp", whole),
    "pipeline_model_parallel_size": ("pp", whole),
    "expert_model_parallel_size": ("ep", whole),
    "context_parallel_size": ("cp", whole),
    "sequence_parallel": ("sequence_parallel", flag),
}
_MCA_TEXT = """
tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size
sequence_parallel virtual_pipeline_model_parallel_size recompute_granularity recompute_method recompute_num_layers
use_distributed_optimizer overlap_grad_reduce overlap_param_gather moe_grouped_gemm moe_token_dispatcher_type
bias_activation_fusion apply_rope_fusion transformer_impl freeze_language_model
"""
_MCA = frozenset(_MCA_TEXT.split())
"""Megatron's arguments, which LLaMA-Factory passes on when use_mca is on."""
_TASKS = {"pt": "pretrain", "sft": "sft", "rm": "rm", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}


def read_llamafactory(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("llamafactory", file)
    known = huggingface.NAMES | llamafactory.NAMES | _MCA
    understand(reading, leaves, table=TABLE, known=known)
    values = reading.values
    if (task := values.get("task")) is not None:
        values["task"] = Written(_TASKS.get(str(task.value), task.value), task.key, task.file, task.line)
    if (off := values.pop("no_checkpointing", None)) is not None:
        values["checkpointing"] = Written(not off.value, off.key, off.file, off.line)
    if (export := values.pop("export_dir", None)) is not None:
        values["task"] = Written("export", export.key, export.file, export.line)
        values["export"] = Written("merge", export.key, export.file, export.line)
        values.setdefault("output_dir", export)
    isolated = values.get("isolated")
    if isolated is not None and isolated.value:
        values.setdefault("packing", isolated)
    loss = [leaf for leaf in leaves if leaf.key == "pref_loss"]
    if loss and loss[0].value in ("orpo", "simpo") and values.get("task", Written()).value == "dpo":
        reading.put("task", loss[0].value, loss[0])
    values.setdefault("adapter", Written("lora", "finetuning_type", file, default=True))
    values.setdefault("lora_targets", Written(("all",), "lora_target", file, default=True))
    if values.get("task", Written("sft")).value == "sft":
        values.setdefault("packing", Written(False, "packing", file, default=True))
    values.setdefault("checkpointing", Written(True, "disable_gradient_checkpointing", file, default=True))
    reading = finish(reading, leaves, TRAINER_DEFAULTS)
    validation = [leaf for leaf in leaves if leaf.key in ("val_size", "eval_dataset") and leaf.value]
    if validation and "evaluates" not in values:
        reading.put("evaluates", True, validation[0])
    return reading
