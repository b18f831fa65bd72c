"""Arguments of the Hugging Face Trainer and of TRL, from YAML, JSON or a command line."""

from collections.abc import Iterable

from gatewright.preflight.job import Written
from gatewright.preflight.options import huggingface as trainer_names
from gatewright.preflight.options import trl as trl_names
from gatewright.preflight.reading import Reading, Table, attention, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

TRAINER: Table = {
    "model_name_or_path": ("model", word),
    "trust_remote_code": ("trust_remote_code", flag),
    "attn_implementation": ("attention", attention),
    "per_device_train_batch_size": ("micro_batch", whole),
    "per_device_eval_batch_size": ("eval_batch", whole),
    "gradient_accumulation_steps": ("accumulation", whole),
    "eval_accumulation_steps": ("eval_accumulation", whole),
    "learning_rate": ("lr", number),
    "max_steps": ("max_steps", whole),
    "num_train_epochs": ("epochs", number),
    "warmup_steps": ("warmup_steps", whole),
    "warmup_ratio": ("warmup_ratio", number),
    "max_grad_norm": ("clip_norm", number),
    "optim": ("optimizer", word),
    "fp16": ("fp16", flag),
    "bf16": ("bf16", flag),
    "gradient_checkpointing": ("checkpointing", flag),
    "activation_checkpointing": ("checkpointing", flag),
    "gradient_checkpointing_kwargs.use_reentrant": ("reentrant", flag),
    "activation_checkpointing_kwargs.use_reentrant": ("reentrant", flag),
    "output_dir": ("output_dir", word),
    "save_steps": ("save_steps", whole),
    "save_strategy": ("save_strategy", word),
    "save_total_limit": ("save_limit", whole),
    "save_only_model": ("save_only_model", flag),
    "save_safetensors": ("safetensors", flag),
    "resume_from_checkpoint": ("resume", word),
    "overwrite_output_dir": ("overwrite", flag),
    "ignore_data_skip": ("ignore_data_skip", flag),
    "enable_jit_checkpoint": ("jit_checkpoint", flag),
    "load_best_model_at_end": ("load_best", flag),
    "eval_steps": ("eval_steps", whole),
    "do_eval": ("evaluates", flag),
    "use_liger_kernel": ("liger", flag),
    "use_cache": ("use_cache", flag),
    "logging_nan_inf_filter": ("nan_filter", flag),
    "ddp_find_unused_parameters": ("find_unused", flag),
    "fsdp_config.fsdp_version": ("fsdp_version", whole),
    "fsdp_config.version": ("fsdp_version", whole),
    "fsdp_config.state_dict_type": ("fsdp_state_dict", word),
    "fsdp_config.fsdp_state_dict_type": ("fsdp_state_dict", word),
    "fsdp_config.cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "fsdp_config.sync_module_states": ("fsdp_sync", flag),
    "parallelism_config.tp_size": ("tp", whole),
    "parallelism_config.cp_size": ("cp", whole),
    "streaming": ("streaming", flag),
}

TRL: Table = {
    **TRAINER,
    "max_length": ("max_tokens", whole),
    "max_seq_length": ("max_tokens", whole),
    "max_prompt_length": ("max_prompt_tokens", whole),
    "packing": ("packing", flag),
    "packing_strategy": ("packing_strategy", word),
    "chat_template_path": ("template", word),
    "pad_token": ("pad_token", word),
    "eos_token": ("eos_token", word),
    "router_aux_loss_coef": ("aux", number),
    "model_init_kwargs.router_aux_loss_coef": ("aux", number),
    "model_init_kwargs.output_router_logits": ("router_logits", flag),
    "model_init_kwargs.attn_implementation": ("attention", attention),
    "model_init_kwargs.experts_implementation": ("experts_kernel", word),
    "load_in_4bit": ("load_in_4bit", flag),
    "load_in_8bit": ("load_in_8bit", flag),
    "use_peft": ("use_peft", flag),
    "lora_r": ("lora_rank", whole),
    "lora_dropout": ("lora_dropout", number),
    "lora_target_modules": ("lora_targets", words),
    "lora_target_parameters": ("lora_target_parameters", words),
    "lora_modules_to_save": ("lora_modules_to_save", words),
    "use_dora": ("lora_dora", flag),
    "dataset_streaming": ("streaming", flag),
    "beta": ("beta", number),
    "loss_type": ("loss_type", words),
    "teacher_model_name_or_path": ("teacher", word),
}
"""`load_in_4bit`, `use_peft` and `loss_type` become other fields below."""

TRAINER_DEFAULTS: dict[str, object] = {
    "micro_batch": 8,
    "eval_batch": 8,
    "accumulation": 1,
    "save_steps": 500,
    "save_strategy": "steps",
    "nan_filter": True,
}
TRL_DEFAULTS: dict[str, object] = {
    **TRAINER_DEFAULTS,
    "checkpointing": True,
    "max_tokens": 1024,
    "packing": False,
    "lora_dropout": 0.05,
}
"""Of TrainingArguments 5.24, and of SFTConfig and ModelConfig 1.16, where a rule rests on them."""
DEFAULT_KEYS = {
    "micro_batch": "per_device_train_batch_size",
    "eval_batch": "per_device_eval_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "nan_filter": "logging_nan_inf_filter",
    "checkpointing": "gradient_checkpointing",
    "max_tokens": "max_length",
}
TRL_TASKS = {
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "grpo": "grpo",
    "reward": "rm",
    "rloo": "rloo",
    "gkd": "distill",
    "orpo": "orpo",
}


def read_trainer(leaves: list[Leaf], *, file: str) -> Reading:
    """Arguments of a script that uses the Trainer alone."""
    reading = Reading("transformers", file)
    understand(reading, leaves, table={**TRAINER, **_PEFT}, known=trainer_names.NAMES | trl_names.NAMES)
    return finish(reading, leaves, TRAINER_DEFAULTS)


def read_trl(leaves: list[Leaf], *, file: str, task: str = "") -> Reading:
    """Arguments of `trl sft`, `trl dpo` and of TRL's scripts."""
    reading = Reading("trl", file)
    understand(reading, leaves, table=TRL, known=trainer_names.NAMES | trl_names.NAMES)
    line = leaves[0].line if leaves else 0
    if task:
        reading.values["task"] = Written(TRL_TASKS.get(task, task), f"trl {task}", file, line)
    elif "beta" in reading.values or "max_prompt_tokens" in reading.values:
        reading.values["task"] = Written("dpo", "beta", file, line)
    else:
        reading.values["task"] = Written("sft", "trl", file, line, default=True)
    sft = reading.values["task"].value == "sft"
    return finish(reading, leaves, TRL_DEFAULTS if sft else {**TRAINER_DEFAULTS, "checkpointing": True})


_PEFT: Table = {key: TRL[key] for key in ("load_in_4bit", "load_in_8bit", "use_peft", "lora_r", "lora_target_modules")}


def finish(reading: Reading, leaves: Iterable[Leaf], defaults: dict[str, object]) -> Reading:
    """What follows from several arguments, the files they name, secrets, and the Trainer's own defaults."""
    values = reading.values
    for name, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if (said := values.pop(name, None)) and said.value:
            values["bits"] = Written(bits, said.key, said.file, said.line)
    peft = values.pop("use_peft", None)
    loss = values.pop("loss_type", None)
    if loss is not None and loss.value and str(loss.value[0]).startswith("chunked"):
        values["liger"] = Written(True, loss.key, loss.file, loss.line)
    if "adapter" not in values:
        said = peft or values.get("lora_rank")
        wanted = said is not None and (said.value is not False and bool(said.value))
        at = said or Written(key="use_peft", file=reading.file)
        values["adapter"] = Written("lora" if wanted else "full", at.key, at.file, at.line, default=said is None)
    for leaf in leaves:
        _name_or_switch(reading, leaf)
    for name, value in defaults.items():
        values.setdefault(name, Written(value, DEFAULT_KEYS.get(name, name), reading.file, default=True))
    return reading


def _name_or_switch(reading: Reading, leaf: Leaf) -> None:
    text = str(leaf.value)
    switched_on = text.lower() not in ("", "none", "no", "false", "null")
    if leaf.key in ("deepspeed", "deepspeed_config", "deepspeed_config_file", "fsdp_config", "config_file"):
        if switched_on and isinstance(leaf.value, str):
            reading.names.append(Written(text, leaf.key, reading.file, leaf.line))
        if "deepspeed" in leaf.key and switched_on:
            reading.put("backend", "deepspeed", leaf)
    elif leaf.key == "fsdp" and switched_on and leaf.value != []:
        reading.put("fsdp", True, leaf)
    elif leaf.key in ("eval_strategy", "evaluation_strategy"):
        reading.put("evaluates", switched_on, leaf)
    elif (
        leaf.key in ("hub_token", "push_to_hub_token", "token", "hf_hub_token", "api_key")
        and switched_on
        and text[0] != "$"
    ):
        reading.secrets.append(Written("…", leaf.key, reading.file, leaf.line))
