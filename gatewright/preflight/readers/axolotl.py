"""axolotl's YAML."""

from gatewright.preflight.job import Written
from gatewright.preflight.options.axolotl import NAMES
from gatewright.preflight.reading import Reading, Table, attention, flag, number, understand, whole, word, words
from gatewright.preflight.source import Leaf

TABLE: Table = {
    "base_model": ("model", word),
    "trust_remote_code": ("trust_remote_code", flag),
    "adapter": ("adapter", word),
    "lora_model_dir": ("adapter_path", word),
    "lora_r": ("lora_rank", whole),
    "lora_dropout": ("lora_dropout", number),
    "lora_target_modules": ("lora_targets", words),
    "lora_target_parameters": ("lora_target_parameters", words),
    "lora_modules_to_save": ("lora_modules_to_save", words),
    "peft_use_dora": ("lora_dora", flag),
    "quantize_moe_experts": ("quantize_experts", flag),
    "experts_implementation": ("experts_kernel", word),
    "fp16": ("fp16", flag),
    "float16": ("fp16", flag),
    "bf16": ("bf16", flag),
    "bfloat16": ("bf16", flag),
    "fp8": ("fp8", word),
    "attn_implementation": ("attention", attention),
    "optimizer": ("optimizer", word),
    "sequence_len": ("max_tokens", whole),
    "sample_packing": ("packing", flag),
    "pad_to_sequence_len": ("pad_to_max", flag),
    "chat_template": ("template", word),
    "train_on_inputs": ("train_on_prompt", flag),
    "special_tokens.pad_token": ("pad_token", word),
    "special_tokens.eos_token": ("eos_token", word),
    "tokens": ("new_tokens", words),
    "streaming": ("streaming", flag),
    "max_prompt_len": ("max_prompt_tokens", whole),
    "micro_batch_size": ("micro_batch", whole),
    "eval_batch_size": ("eval_batch", whole),
    "gradient_accumulation_steps": ("accumulation", whole),
    "batch_size": ("total_batch_in_axolotl", whole),
    "learning_rate": ("lr", number),
    "max_steps": ("max_steps", whole),
    "num_epochs": ("epochs", number),
    "warmup_steps": ("warmup_steps", whole),
    "warmup_ratio": ("warmup_ratio", number),
    "max_grad_norm": ("clip_norm", number),
    "rl_beta": ("beta", number),
    "dpo_beta": ("beta", number),
    "gradient_checkpointing_kwargs.use_reentrant": ("reentrant", flag),
    "output_dir": ("output_dir", word),
    "save_steps": ("save_steps", whole),
    "saves_per_epoch": ("saves_per_epoch", whole),
    "eval_steps": ("eval_steps", whole),
    "evals_per_epoch": ("evals_per_epoch", whole),
    "save_strategy": ("save_strategy", word),
    "save_total_limit": ("save_limit", whole),
    "save_only_model": ("save_only_model", flag),
    "save_safetensors": ("safetensors", flag),
    "resume_from_checkpoint": ("resume", word),
    "auto_resume_from_checkpoints": ("auto_resume", flag),
    "load_best_model_at_end": ("load_best", flag),
    "fsdp_version": ("fsdp_version", whole),
    "fsdp_config.fsdp_version": ("fsdp_version", whole),
    "fsdp_config.state_dict_type": ("fsdp_state_dict", word),
    "fsdp_config.fsdp_state_dict_type": ("fsdp_state_dict", word),
    "fsdp_config.cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": ("fsdp_ram_efficient", flag),
    "fsdp_config.sync_module_states": ("fsdp_sync", flag),
    "fsdp_config.fsdp_sync_module_states": ("fsdp_sync", flag),
    "expert_parallel_size": ("ep", whole),
    "expert_parallel_backend": ("dispatcher", word),
    "tensor_parallel_size": ("tp", whole),
    "context_parallel_size": ("cp", whole),
    "sequence_parallel_degree": ("cp", whole),
    "ring_attn_func": ("ring", word),
    "ddp_find_unused_parameters": ("find_unused", flag),
    "model_config.router_aux_loss_coef": ("aux", number),
    "model_config.output_router_logits": ("router_logits", flag),
    "overrides_of_model_config.router_aux_loss_coef": ("aux", number),
    "overrides_of_model_config.output_router_logits": ("router_logits", flag),
}

_ATTENTION = {"flash_attention": "flash", "sdp_attention": "sdpa", "eager_attention": "eager", "flex_attention": "flex"}
_TASKS = ("dpo", "kto", "orpo", "simpo", "ipo", "grpo", "gdpo", "bco", "ebft")


def read_axolotl(leaves: list[Leaf], *, file: str) -> Reading:
    reading = Reading("axolotl", file)
    understand(reading, leaves, table=TABLE, known=NAMES | {"model_config"})
    tokens = [leaf for leaf in leaves if leaf.key.startswith("tokens[") or leaf.key == "additional_special_tokens"]
    if tokens and "new_tokens" not in reading.values:
        reading.put("new_tokens", tuple(str(leaf.value) for leaf in tokens), tokens[0])
    for leaf in leaves:
        _derived(reading, leaf)
    values = reading.values
    if values.get("adapter", Written()).value == "qlora":
        said = values["adapter"]
        values.setdefault("bits", Written(4, said.key, said.file, said.line))
    pattern = [leaf for leaf in leaves if leaf.key.startswith("lora_rank_pattern.")]
    if pattern:
        keys = tuple(leaf.key.removeprefix("lora_rank_pattern.") for leaf in pattern)
        values["lora_rank_pattern"] = Written(keys, "lora_rank_pattern", file, pattern[0].line)
    values.setdefault("adapter", Written("full", "adapter", file, default=True))
    values.setdefault("task", Written("sft", "rl", file, default=True))
    values.setdefault("packing", Written(False, "sample_packing", file, default=True))
    if values["packing"].value:
        values.setdefault("isolated", Written(True, "sample_packing", file, default=True))
    return reading


def _derived(reading: Reading, leaf: Leaf) -> None:
    on = str(leaf.value).lower() not in ("", "none", "no", "false", "null", "0", "0.0", "[]")
    if leaf.key in _ATTENTION and on:
        reading.put("attention", _ATTENTION[leaf.key], leaf)
    elif leaf.key == "gradient_checkpointing" and leaf.value is not None:
        reading.put("checkpointing", on, leaf)
    elif leaf.key == "load_in_4bit" and on:
        reading.put("bits", 4, leaf)
    elif leaf.key == "load_in_8bit" and on:
        reading.put("bits", 8, leaf)
    elif leaf.key == "lora_target_linear" and on:
        reading.put("lora_targets", ("all-linear",), leaf)
    elif leaf.key == "rl" and leaf.value in _TASKS:
        reading.put("task", leaf.value, leaf)
    elif leaf.key == "kd_trainer" and on:
        reading.put("task", "distill", leaf)
    elif leaf.key == "deepspeed" and on:
        reading.put("backend", "deepspeed", leaf)
        reading.names.append(Written(str(leaf.value), leaf.key, reading.file, leaf.line))
    elif leaf.key.split(".")[0].split("[")[0] in ("fsdp", "fsdp_config") and on:
        reading.values.setdefault("fsdp", Written(True, leaf.key.split(".")[0], reading.file, leaf.line))
    elif leaf.key in ("val_set_size",) or leaf.key.startswith("test_datasets"):
        reading.put("evaluates", on, leaf)
    elif leaf.key in ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy") and on:
        reading.put("liger", True, leaf)
