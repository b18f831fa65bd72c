"""Which part of a model a parameter belongs to, told by where it lies, for any architecture of transformers."""

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from gatewright.model.expert_lora import LORA
from gatewright.model.experts import find_experts

ROLES = ("embedding", "attention", "mlp", "router", "experts", "shared_experts", "norm", "head", "other")

_ATTENTION = re.compile(r"(^|[._])(attn|attention|mixer|mamba|conv|short_conv)([._]|$)")
_MLP = re.compile(r"(^|\.)(mlp|ffn|feed_forward|block_sparse_moe|moe|shared_mlp)(\.|$)|\.mixer\.(up|gate|down)_proj\.")
_NEITHER = re.compile(r"(^|\.)(indexer|dt_proj|vision\w*|visual|audio\w*|multi_modal_projector|embed_vision)\.|_hc\.")
"""An indexer only chooses keys, and no gradient goes through a choice; Mamba's code takes dt_proj's weight past an
adapter; hyper-connections mix residual streams; no text goes through a vision or audio tower."""
_PEFT_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?[AB]\.default(?:\.weight)?")
_EXPERT_FACTOR = re.compile(rf"(.+)\.{LORA}\.[AB]\.(\w+)")
_PARAMETRIZED = re.compile(r"(.+)\.parametrizations\.(\w+)\.(original|\d+\.[AB])")


def parameter_roles(model: PreTrainedModel) -> dict[str, str]:
    """Name of each parameter -> one of ROLES; an adapter's parameters have the role of the weight they adapt."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = {names[id(module)].rpartition(".")[0]: names[id(module)] for module in find_experts(model).values()}
    fixed = {names[id(model.get_input_embeddings())]: "embedding"}
    head = model.get_output_embeddings()
    if head is not None:
        fixed[names[id(head)]] = "head"
    return {name: _role(bare_name(name)[0], fixed, blocks) for name, _ in model.named_parameters()}


def bare_name(name: str) -> tuple[str, bool]:
    """The name that the weight behind a parameter has in the bare model, and whether the parameter is its adapter's."""
    if match := _PEFT_FACTOR.fullmatch(name):
        return f"{match[1]}.weight", True
    if match := _EXPERT_FACTOR.fullmatch(name):
        return f"{match[1]}.{match[2]}", True
    if match := _PARAMETRIZED.fullmatch(name):
        return f"{match[1]}.{match[2]}", match[3] != "original"
    return name.replace(".base_layer.", "."), False


def layer_of(name: str) -> int | None:
    """Index of the layer that a parameter or module lies in; None outside the layers."""
    match = re.search(r"\.(\d+)(\.|$)", name)
    return int(match[1]) if match else None


def is_attention(name: str) -> bool:
    """Whether a module or parameter of that name belongs to an attention (or other token-mixing) block."""
    return bool(_ATTENTION.search(name))


def head_is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _role(name: str, fixed: Mapping[str, str], moe_blocks: Mapping[str, str]) -> str:
    module = name.rpartition(".")[0]
    if module in fixed:
        return fixed[module]
    for block, experts in moe_blocks.items():
        if name.startswith(f"{experts}."):
            return "experts"
        if name.startswith(f"{block}."):
            child = name[len(block) + 1 :].split(".")[0]
            if child.startswith("shared") and not child.endswith("gate"):
                return "shared_experts"
            if "norm" not in child:
                return "router"
    if _NEITHER.search(name):
        return "other"
    if re.search(r"norm|(^|\.)ln_?\w*\.(weight|bias)$", name):
        return "norm"
    if ".shared_mlp." in name and moe_blocks:
        return "shared_experts"
    if _MLP.search(name):
        return "mlp"
    if is_attention(name):
        return "attention"
    return "other"
