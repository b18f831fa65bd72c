"""Settings that have the same meaning in several tools, by the name each tool gives them."""

from gatewright.spec.finding import Change

_WHERE = {
    "gatewright": "run file",
    "huggingface": "training arguments",
    "deepspeed": "DeepSpeed JSON",
    "megatron": "command",
}

_KNOBS: dict[str, dict[str, tuple[str, str]]] = {
    "smaller_micro_batch": {
        "gatewright": ("train.micro_batch_tokens", "half of the present value"),
        "huggingface": ("per_device_train_batch_size", "1"),
        "deepspeed": ("train_micro_batch_size_per_gpu", "1"),
        "megatron": ("--micro-batch-size", "1"),
    },
    "shorter_samples": {
        "gatewright": ("data.max_tokens", "p99"),
        "huggingface": ("max_length", "p99 of the data"),
        "megatron": ("--seq-length", "p99 of the data"),
    },
    "recompute_activations": {
        "gatewright": ("train.checkpointing", "full"),
        "huggingface": ("gradient_checkpointing", "true"),
        "deepspeed": ("activation_checkpointing.partition_activations", "true"),
        "megatron": ("--recompute-granularity", "full"),
    },
    "smaller_evaluation": {
        "huggingface": ("per_device_eval_batch_size", "1"),
        "megatron": ("--eval-micro-batch-size", "1"),
    },
    "evaluation_to_host": {"huggingface": ("eval_accumulation_steps", "1")},
    "save_more_often": {
        "gatewright": ("train.save_every_steps", "a third of the steps one job does"),
        "huggingface": ("save_steps", "a third of the steps one job does"),
        "megatron": ("--save-interval", "a third of the steps one job does"),
    },
    "lower_lr": {
        "gatewright": ("train.lr", "a third of the present value"),
        "huggingface": ("learning_rate", "a third of the present value"),
        "megatron": ("--lr", "a third of the present value"),
    },
}


def knobs(tool: str, *names: str) -> tuple[Change, ...]:
    """The changes for a tool; without a known tool, those of Hugging Face's Trainer, whose names most others use."""
    changes = []
    for name in names:
        by_tool = _KNOBS[name]
        known = tool if tool in by_tool else ("" if tool == "gatewright" else "huggingface")
        if known in by_tool:
            setting, value = by_tool[known]
            changes.append(Change(setting=setting, value=value, where=_WHERE[known]))
    return tuple(changes)
