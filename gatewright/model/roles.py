"""Which part of a model a parameter belongs to, told by where it lies, for any architecture of transformers."""

import re
from collections.abc import Mapping

from torch import nn

from gatewright.model.experts import find_experts

ROLES = ("embedding", "attention", "mlp", "router", "experts", "shared_experts", "norm", "head", "other")

_ATTENTION = re.compile(r"(^|[._])(attn|attention|mixer|mamba|conv|short_conv)([._]|$)")
_MLP = re.compile(r"(^|\.)(mlp|ffn|feed_forward|block_sparse_moe|moe|shared_mlp)(\.|$)|\.mixer\.(up|gate|down)_proj\.")
_NEITHER = re.compile(r"(^|\.)indexer\.|_hc\.")
"""An indexer only chooses keys, and no gradient goes through a choice; hyper-connections mix residual streams."""


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Name of each parameter -> one of ROLES. To be called before adapters are added."""
    experts_names = {id(module) for module in find_experts(model).values()}
    paths = [name for name, module in model.named_modules() if id(module) in experts_names]
    blocks = {path.rpartition(".")[0]: path for path in paths}
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    fixed = {id(embedding.weight): "embedding"}
    if head is not None and head.weight is not embedding.weight:
        fixed |= {id(p): "head" for p in head.parameters()}
    return {name: fixed.get(id(p)) or _role(name, blocks) for name, p in model.named_parameters()}


def is_attention(name: str) -> bool:
    """Whether a module or parameter of that name belongs to an attention (or other token-mixing) block."""
    return bool(_ATTENTION.search(name))


def _role(name: str, moe_blocks: Mapping[str, str]) -> str:
    for block, experts in moe_blocks.items():
        if name.startswith(f"{experts}."):
            return "experts"
        if name.startswith(f"{block}."):
            child = name[len(block) + 1 :].split(".")[0]
            if child.startswith("shared") and not child.endswith("gate"):
                return "shared_experts"
            if "norm" not in child:
                return "router"
    if re.search(r"norm|(^|\.)ln_?\w*\.(weight|bias)$", name):
        return "norm"
    if _NEITHER.search(name):
        return "other"
    if ".shared_mlp." in name and moe_blocks:
        return "shared_experts"
    if _MLP.search(name):
        return "mlp"
    if is_attention(name):
        return "attention"
    return "other"
