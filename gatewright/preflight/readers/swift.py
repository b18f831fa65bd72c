"""ms-swift's and Megatron-SWIFT's command lines, and the same arguments in YAML."""

from gatewright.preflight.job import Written
from gatewright.preflight.options import huggingface, megatron, swift, swift_megatron
from gatewright.preflight.readers.huggingface import TRAINER, finish
from gatewright.preflight.readers.megatron import TABLE as MEGATRON
from gatewright.preflight.readers.megatron import states
from gatewright.preflight.reading import Reading, Table, attention, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

SHARED: Table = {
    "model": ("model", word),
    "rlhf_type": ("task", word),
    "tuner_type": ("adapter", word),
    "train_type": ("adapter", word),
    "adapters": ("adapter_path", word),
    "lora_rank": ("lora_rank", whole),
    "lora_dropout": ("lora_dropout", number),
    "target_modules": ("lora_targets", words),
    "target_parameters": ("lora_target_parameters", words),
    "modules_to_save": ("lora_modules_to_save", words),
    "use_dora": ("lora_dora", flag),
    "quant_bits": ("bits", whole),
    "attn_impl": ("attention", attention),
    "experts_impl": ("experts_kernel", word),
    "max_length": ("max_tokens", whole),
    "packing": ("packing", flag),
    "padding_free": ("padding_free", flag),
    "template": ("template", word),
    "beta": ("beta", number),
    "router_aux_loss_coef": ("aux", number),
    "teacher_model": ("teacher", word),
    "teacher_deepspeed": ("teacher_sharding", word),
    "teacher_model_server": ("teacher_sharding", word),
    "offload_teacher_model": ("teacher_sharding", word),
    "resume_only_model": ("load_only_model", flag),
    "sequence_parallel_size": ("cp", whole),
    "streaming": ("streaming", flag),
    "new_special_tokens": ("new_tokens", words),
    "api_key": ("unused", word),
}
_TASKS = {"gkd": "distill", "sft": "sft", "pt": "pretrain"}
_STAGES = ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


def read_swift(leaves: list[Leaf], *, file: str, verb: str = "sft") -> Reading:
    """`swift sft`, `swift rlhf`, `swift pt`, `swift export`."""
    reading = Reading("swift", file)
    understand(reading, leaves, table={**TRAINER, **SHARED}, known=huggingface.NAMES | swift.NAMES)
    _task(reading, verb, leaves)
    values = reading.values
    for leaf in leaves:
        if leaf.key == "deepspeed" and leaf.value in _STAGES:  # a built-in config, not a file
            reading.put("zero", int(str(leaf.value)[4]), leaf)
            if str(leaf.value).endswith("offload"):
                reading.put("offload_optimizer", "cpu", leaf)
    if verb == "export" and any(leaf.key == "merge_lora" and str(leaf.value).lower() == "true" for leaf in leaves):
        merge = next(leaf for leaf in leaves if leaf.key == "merge_lora")
        reading.put("export", "merge", merge)
    values.setdefault("adapter", Written("lora", "tuner_type", file, default=True))
    reading = finish(reading, leaves, {"save_strategy": "steps", "nan_filter": True, "checkpointing": True})
    reading.names = [said for said in reading.names if said.value not in _STAGES]
    _packing(reading)
    return reading


def read_swift_megatron(leaves: list[Leaf], *, file: str, verb: str = "sft") -> Reading:
    """`megatron sft`, `megatron rlhf`, `megatron pt`."""
    reading = Reading("swift-megatron", file)
    known = swift.NAMES | swift_megatron.NAMES | megatron.NAMES
    understand(reading, leaves, table={**MEGATRON, **SHARED, **_MEGATRON_OWN}, known=known)
    _task(reading, verb, leaves)
    values = reading.values
    values["backend"] = Written("megatron", f"megatron {verb}", file, default=True)
    for leaf in leaves:
        if leaf.key == "sequence_packing_scheduler" and leaf.value == "default_dynamic_cp":
            reading.put("dynamic_cp", True, leaf)
        elif leaf.key == "recompute_granularity" and leaf.value:
            reading.put("checkpointing", leaf.value != "none", leaf)
    values.setdefault("adapter", Written("full", "tuner_type", file, default=True))
    states(reading)
    _packing(reading)
    return reading


_MEGATRON_OWN: Table = {
    "output_dir": ("output_dir", word),
    "save_steps": ("save_steps", whole),
    "save_total_limit": ("save_limit", whole),
    "num_train_epochs": ("epochs", number),
    "micro_batch_size": ("micro_batch", whole),
}


def _task(reading: Reading, verb: str, leaves: list[Leaf]) -> None:
    line = leaves[0].line if leaves else 0
    if (said := reading.values.get("task")) is not None:
        reading.values["task"] = Written(_TASKS.get(str(said.value), said.value), said.key, said.file, said.line)
    else:
        task = {"export": "export", "rlhf": "dpo"}.get(verb, _TASKS.get(verb, verb))
        reading.values["task"] = Written(task, f"swift {verb}", reading.file, line, default=True)


def _packing(reading: Reading) -> None:
    """ms-swift packs with isolated documents; padding_free is the same layout without a length to fill."""
    values = reading.values
    free = values.pop("padding_free", None)
    values.pop("unused", None)
    if "packing" not in values and free is not None and free.value:
        values["packing"] = free
    if values.get("packing", Written()).value:
        values.setdefault("isolated", Written(True, "packing", reading.file, default=True))
