"""Our own run file; what it means to the rules."""

from gatewright.preflight.job import Written
from gatewright.preflight.reading import Reading, Table, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf
from gatewright.spec.run import Run

_UNITS = {"m": 60, "h": 3600, "d": 86400}


def duration(value: object) -> int:
    """90m, 24h or 2d, in seconds."""
    text = word(value)
    return whole(text[:-1]) * _UNITS.get(text[-1:], 60)


def capacity(value: object) -> float | None:
    return None if value == "dropless" else number(value)


TABLE: Table = {
    "run": ("output_dir", word),
    "model.path": ("model", word),
    "model.trust_remote_code": ("trust_remote_code", flag),
    "method.adapter.rank": ("lora_rank", whole),
    "method.adapter.dropout": ("lora_dropout", number),
    "method.adapter.targets": ("lora_targets", words),
    "method.adapter.full": ("lora_modules_to_save", words),
    "method.adapter.experts.most_routed": ("expert_share", number),
    "data.pack": ("packing", flag),
    "data.chat_template": ("template", word),
    "train.steps": ("max_steps", whole),
    "train.epochs": ("epochs", number),
    "train.lr": ("lr", number),
    "train.warmup_steps": ("warmup_steps", whole),
    "train.clip_norm": ("clip_norm", number),
    "train.optimizer": ("optimizer", word),
    "train.save_every_steps": ("save_steps", whole),
    "train.keep_checkpoints": ("save_limit", whole),
    "train.save_in_background": ("save_in_background", flag),
    "router.train": ("router_trains", flag),
    "router.balance": ("aux", number),
    "router.z": ("z", number),
    "router.capacity": ("capacity", capacity),
    "parallel.ep": ("ep", whole),
    "hardware.per_node": ("gpus_per_node", whole),
    "hardware.nodes": ("nodes", whole),
    "hardware.gpu": ("gpu", word),
    "cluster.partition": ("partition", word),
    "cluster.time_limit": ("time_limit_s", duration),
    "cluster.links": ("links", whole),
}


def read_ours(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("gatewright", file)
    understand(reading, leaves, table=TABLE, known=frozenset(Run.model_fields))
    values = reading.values
    for leaf in leaves:
        if leaf.key in ("data.max_tokens", "parallel.cp") and isinstance(leaf.value, int):
            reading.put({"data.max_tokens": "max_tokens", "parallel.cp": "cp"}[leaf.key], leaf.value, leaf)
        elif leaf.key == "parallel.dense" and str(leaf.value).startswith("zero"):
            reading.put("zero", whole(str(leaf.value)[4:]), leaf)
        elif leaf.key == "method.quantize" and leaf.value == "nf4":
            reading.put("bits", 4, leaf)
            reading.put("quantize_experts", True, leaf)
        elif leaf.key.startswith("method.adapter.experts.layers"):
            values.setdefault("expert_share", Written(0.0, "method.adapter.experts.layers", file, leaf.line))
        elif leaf.key == "train.checkpointing":
            reading.put("checkpointing", leaf.value != "none", leaf)
        elif leaf.key.startswith("evaluate."):
            values.setdefault("evaluates", Written(True, "evaluate", file, leaf.line))
    said = values.get("lora_rank")
    values["adapter"] = Written("lora" if said else "full", "method.adapter", file, said.line if said else 0)
    defaults: dict[str, object] = {"task": "sft", "packing": True, "isolated": True, "save_steps": 100, "save_limit": 2}
    defaults |= {"auto_resume": True, "checkpointing": False, "liger": True, "router_trains": False}
    defaults["save_in_background"] = True
    if said:
        defaults["lora_targets"] = ("attention", "experts")
    for name, value in defaults.items():
        values.setdefault(name, Written(value, name, file, default=True))
    return reading
