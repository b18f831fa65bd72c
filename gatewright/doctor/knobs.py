"""Settings that have the same meaning in several tools, by the name each tool gives them."""

from gatewright.spec.finding import Change
from gatewright.spec.plan import Knob

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
    "eight_bit_optimizer": {
        "gatewright": ("train.optimizer", "adamw8bit"),
        "huggingface": ("optim", "adamw_bnb_8bit"),
    },
    "lower_rank": {
        "gatewright": ("method.adapter.rank", "half of the present value"),
        "huggingface": ("lora_r", "half of the present value"),
    },
    "four_bit_base": {
        "gatewright": ("method.quantize", "nf4"),
        "huggingface": ("load_in_4bit", "true"),
    },
    "shard_weights": {
        "gatewright": ("parallel.dense", "zero3"),
        "deepspeed": ("zero_optimization.stage", "3"),
    },
    "expert_parallelism": {
        "gatewright": ("parallel.ep", "twice the present value"),
        "megatron": ("--expert-model-parallel-size", "twice the present value"),
    },
    "context_parallelism": {
        "gatewright": ("parallel.cp", "twice the present value"),
        "megatron": ("--context-parallel-size", "twice the present value"),
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


def turned(tool: str, knob: Knob) -> Change | None:
    """A planned change in the words of a tool; None where the tool has no such setting."""
    by_tool = _KNOBS[knob.name]
    if tool in ("", "gatewright"):
        return Change(setting=knob.setting, value=knob.value, was=knob.was, where=_WHERE["gatewright"])
    known = tool if tool in by_tool else "huggingface"
    if known not in by_tool:
        return None
    setting, value = by_tool[known]
    return Change(setting=setting, value=value, where=_WHERE[known])


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
