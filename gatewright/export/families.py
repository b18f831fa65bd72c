"""The architectures that we convert to GGUF ourselves: what llama.cpp calls them, and what it cannot say of them.

llama.cpp's graph of an architecture fixes what a Hugging Face config leaves open (whether the chosen routing weights
are normalised, say). A config that says something else would load there and answer wrongly, so it is refused here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gatewright.spec.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers as llama.cpp knows it."""

    architecture: str
    """general.architecture in the GGUF file."""
    interleaves_rope: bool = False
    """Rotary pairs are neighbours (2i, 2i+1) there; transformers has them half a head apart."""
    normalises: bool | None = None
    """norm_topk_prob as the graph has it; None where the config has no such choice."""
    every_layer_routed: bool = False
    """The graph has no dense layers among the MoE layers."""


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(architecture="llama", interleaves_rope=True),
    "MixtralForCausalLM": Family(architecture="llama", interleaves_rope=True),
    "Qwen2ForCausalLM": Family(architecture="qwen2"),
    "Qwen3ForCausalLM": Family(architecture="qwen3"),
    "Qwen2MoeForCausalLM": Family(architecture="qwen2moe", normalises=False, every_layer_routed=True),
    "Qwen3MoeForCausalLM": Family(architecture="qwen3moe", normalises=True, every_layer_routed=True),
    "OlmoeForCausalLM": Family(architecture="olmoe", normalises=False, every_layer_routed=True),
}

# Settings that would change the forward pass and have no place in these graphs, each with the values that change
# nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": (None, "softmax"),
    "routed_scaling_factor": (None, 1.0),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "logit_scale": (None, 1.0),
    "query_pre_attn_scalar": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "n_group": (None, 1),
}
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Config:
    """config.json of a model that can be converted, with what the names in it stand for."""

    values: Mapping[str, Any]
    family: Family

    @property
    def layers(self) -> int:
        return int(self.values["num_hidden_layers"])

    @property
    def heads(self) -> int:
        return int(self.values["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.values.get("num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        return int(self.values.get("head_dim") or self.values["hidden_size"] // self.heads)

    @property
    def experts(self) -> int:
        """Routed experts a layer; 0 for a dense model."""
        return int(self.values.get("num_local_experts") or self.values.get("num_experts") or 0)

    @property
    def tied(self) -> bool:
        return bool(self.values.get("tie_word_embeddings", False))

    @property
    def rope(self) -> Mapping[str, Any]:
        """rope_parameters, from either of the two places where configs have had it."""
        found = dict(self.values.get("rope_parameters") or self.values.get("rope_scaling") or {})
        found.setdefault("rope_type", found.pop("type", "default"))
        found.setdefault("rope_theta", self.values.get("rope_theta", 10000.0))
        return found


def architecture_of(folder: Path) -> str:
    """Class name of the model in the folder."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str((values.get("architectures") or ["?"])[0])


def read_config(folder: Path) -> Config:
    """The config of a model of one of our families. Raises ModelError for another one, and for what GGUF cannot say."""
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    name = architecture_of(folder)
    family = FAMILIES.get(name)
    if family is None:
        raise ModelError(
            f"{file}: {name} is not converted here (known: {', '.join(FAMILIES)}); give the script that comes with "
            "llama.cpp's source with --converter PATH/convert_hf_to_gguf.py"
        )
    config = Config(values, family)
    for key, harmless in _relevant(values).items():
        if key in values and values[key] not in harmless:
            raise ModelError(
                f"{file}: {key} = {values[key]!r}, which llama.cpp's {family.architecture} graph has no place for; the "
                "GGUF file would load and answer wrongly, so none is written"
            )
    if family.normalises is not None and bool(values.get("norm_topk_prob")) != family.normalises:
        always = "always" if family.normalises else "never"
        raise ModelError(
            f"{file}: norm_topk_prob = {json.dumps(bool(values.get('norm_topk_prob')))}, but llama.cpp's "
            f"{family.architecture} graph {always} normalises the chosen routing weights; the GGUF file would load and "
            "answer wrongly, so none is written"
        )
    if family.every_layer_routed and (values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1):
        raise ModelError(
            f"{file}: some layers are dense (mlp_only_layers, decoder_sparse_step), but llama.cpp's "
            f"{family.architecture} graph has experts in every layer; no GGUF file is written"
        )
    rope = config.rope["rope_type"]
    if rope not in ROPE_TYPES or (rope == "llama3" and family.architecture != "llama"):
        raise ModelError(
            f"{file}: rope_type {rope!r} is not written for {family.architecture}; known are {', '.join(ROPE_TYPES)} "
            "(llama3 for llama alone)"
        )
    return config


def _relevant(values: Mapping[str, Any]) -> Mapping[str, tuple[object, ...]]:
    """NEUTRAL without the window that a Qwen config states but does not use."""
    unused = values.get("use_sliding_window") is False
    return {key: harmless for key, harmless in NEUTRAL.items() if not (key == "sliding_window" and unused)}
