"""Loading: a folder of Hugging Face files into a model with both seams in place; nothing is ever fetched."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)
from transformers.utils import logging as transformers_logging

from gatewright.model import attention, experts, experts_llama4, per_document
from gatewright.model.quantized_load import Divide, Quantize, load_small
from gatewright.model.sources import read_format
from gatewright.spec import run as spec
from gatewright.spec.errors import ModelError


def load_model(
    model: spec.Model,
    *,
    device: torch.device,
    kernel: attention.Kernel,
    quantize: Quantize = "none",
    note: Callable[[str], None] = lambda text: None,
    divide: Divide | None = None,
) -> PreTrainedModel:
    """Returns the causal LM of the folder, frozen, in `model.dtype` on `device`, with our attention and experts.

    `quantize` stores linear layers and experts in few bits; `note` is told of that, and of FP8 files made dense.
    `divide` is shown the model while it is on meta, and may make DTensors of its parameters: of each, only a rank's own
    part is then held.
    Raises ModelError for a folder that is missing or incomplete, weights that the architecture does not know or that
    the files lack, and a mixture of experts whose experts transformers does not run through its experts interface.
    """
    folder = Path(model.path)
    config = read_config(folder, trust_remote_code=model.trust_remote_code)
    files = check_weights(folder)
    form = read_format(config, source=str(folder))
    attention.install(kernel)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    dtype = getattr(torch, model.dtype)
    build = {"attn_implementation": attention.NAME, "trust_remote_code": model.trust_remote_code}
    try:
        if quantize != "none" or form is not None:
            loaded, report = load_small(
                folder,
                files,
                config=config,
                quantize=quantize,
                form=form,
                dtype=dtype,
                device=device,
                build=build,
                seams=lambda empty: put_seams(empty, source=str(folder)),
                note=note,
                divide=divide,
            )
        else:
            loaded, report = _class_of(config, divide).from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that the report names them; they are refused below
                device_map=None if divide is None else {"": device},
                **build,
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise ModelError(
                f"{folder}: {config.model_type} takes its attention from a table of its own, where ours cannot stand, "
                "so it cannot be kept inside documents; docs/models.md lists the architectures that can be trained"
            ) from None
        raise ModelError(f"{folder}: transformers cannot load this model: {_first_line(error)}") from error
    _refuse_gaps(folder, report)
    return put_seams(loaded.to(device), source=str(folder))


def _class_of(config: PretrainedConfig, divide: Divide | None) -> Any:
    """The class that builds the model, followed by `divide`; transformers reads into whatever it then finds."""
    if divide is None:
        return AutoModelForCausalLM
    known = AutoModelForCausalLM._model_mapping[type(config)]

    def build(self: PreTrainedModel, config: PretrainedConfig) -> None:
        known.__init__(self, config)
        experts_llama4.adopt(self)  # so that experts are found
        divide(self, (), remade_rows(self))

    return type(known.__name__, (known,), {"__init__": build, "__module__": known.__module__})


def remade_rows(model: PreTrainedModel) -> set[str]:
    """Names of the weights whose rows are not rows of the files, since loading joins or reorders them.

    Of such a weight (Kimi's convolution is joined from three) a rank cannot read its rows alone: transformers cuts what
    is in the files before it joins them, without a word.
    """
    remade = set()
    for conversion in get_model_conversion_mapping(model):
        if isinstance(conversion, WeightConverter) and not all(map(_keeps_rows, conversion.operations)):
            targets = [re.sub(r"\\\d+|(?<!\.)\*", ".*", pattern) for pattern in conversion.target_patterns]
            remade |= {name for name, _ in model.named_parameters() if any(re.search(t, name) for t in targets)}
    return remade


def _keeps_rows(operation: ConversionOps) -> bool:
    if isinstance(operation, Transpose):
        return min(operation.dim0, operation.dim1) > 0
    return isinstance(operation, MergeModulelist) or (isinstance(operation, Concatenate | Chunk) and operation.dim > 0)


def put_seams(model: PreTrainedModel, *, source: str) -> PreTrainedModel:
    """The same model, frozen, with its experts behind our interface and its other token mixers inside their documents.

    Attention is chosen when a model is built.

    Raises ModelError for a mixture of experts whose experts transformers does not run through its experts interface.
    """
    _refuse_dropout(model.config, source=source)
    experts_llama4.adopt(model)
    experts.install(model)
    per_document.install(model, model.device)
    found = experts.find_experts(model)
    declared = routed_experts(model.config)
    if declared and not found:
        raise ModelError(
            f"{source}: {type(model).__name__} has {declared} routed experts, but not behind transformers' experts "
            "interface: their routing could not be recorded nor adapted; use an architecture built into transformers"
        )
    if found:
        model.set_experts_implementation(experts.NAME)
    model.requires_grad_(False)
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The folder's config.json as transformers reads it."""
    if not folder.is_dir():
        raise ModelError(
            f"model.path: no folder {str(folder)!r}; give a local folder with config.json, tokenizer and safetensors "
            "(models are never fetched from a hub)"
        )
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: no config.json, so this is not a Hugging Face model folder") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ModelError(
            f"{file}: not readable as JSON ({_first_line(error)}); copy it again from the source"
        ) from None
    if "auto_map" in content and not trust_remote_code:
        known = content.get("model_type")
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError):
            raise ModelError(
                f"{file}: model_type {known!r} needs code from the model's folder; read that code, then set "
                "model.trust_remote_code: true if you want to run it"
            ) from None
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"{file}: transformers does not know this architecture: {_first_line(error)}") from None


def check_weights(folder: Path) -> list[str]:
    """Names of the folder's safetensors; refuses it if they are absent, incomplete or cut off, before any is loaded."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: damaged ({_first_line(error)}); copy it again from the source") from None
        missing = [shard for shard in shards if not (folder / shard).exists()]
        if missing:
            raise ModelError(
                f"{folder}: {len(missing)} of {len(shards)} weight files are missing, the first is {missing[0]}; "
                "finish the download"
            )
    elif (folder / "model.safetensors").exists():
        shards = ["model.safetensors"]
    else:
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.gguf"))
        found = (
            f"found {others[0]}, which is not loaded: it can run code"
            if others[:1] and others[0].endswith("bin")
            else ""
        )
        raise ModelError(
            f"{folder}: no model.safetensors and no model.safetensors.index.json; {found or 'nothing to load'}"
        )
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{folder / shard}: cut off or damaged ({_first_line(error)}); finish the download, or copy it again"
            ) from None
    return shards


def _refuse_dropout(config: PretrainedConfig, *, source: str) -> None:
    values = config.get_text_config().to_dict()
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if values.get(key):
            raise ModelError(
                f"{source}: config.json has {key} = {values[key]}, and dropout inside attention is not supported; set "
                "it to 0 there"
            )


def routed_experts(config: PretrainedConfig) -> int:
    """Routed experts a layer that the config declares, under any of its spellings; 0 for a dense model."""
    values = config.get_text_config().to_dict()
    # Nemotron-H writes a number of experts even where none of its layers has any.
    if values.get("model_type") == "nemotron_h" and "moe" not in values["layers_block_type"]:
        return 0
    spellings = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return max((values.get(key) or 0 for key in spellings), default=0)


def _refuse_gaps(folder: Path, report: dict[str, Any]) -> None:
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"{folder}: {len(missing)} weights of the architecture are not in its files and would be random, the first "
            f"is {missing[0]}; the folder is incomplete"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, saved, wanted = mismatched[0]
        raise ModelError(
            f"{folder}: {len(mismatched)} weights have another shape than config.json says, the first is {name}: "
            f"{tuple(saved)} in the file, {tuple(wanted)} by config.json; these files do not belong together"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
