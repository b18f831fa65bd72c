"""Parallelism applied to a model from outside, in one fixed order, on one screen.

    on meta, no bytes read yet      divide             experts cut over ep; zero3: FSDP2 over blocks, embedding and head
    weights read, each its own      settle             experts' dispatch in place, and a head that gathers its weight
    adapters added, roles chosen    spread_gradients   who updates what, and how gradients meet

Inside the model nothing knows of ranks but the experts seam (model/experts.py) and the head (model/head.py).
"""

from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.model.experts import find_experts
from gatewright.model.head import gather_on_use
from gatewright.parallel.dispatch import Dispatch
from gatewright.parallel.gradients import Bucket, Gradients, Named, Share
from gatewright.parallel.layout import refuse_experts
from gatewright.parallel.pieces import Piece
from gatewright.parallel.ranks import SHARD, Ranks

BUCKET_ELEMENTS = 16 << 20
"""Elements that one collective reduces: 64 MiB in float32."""


def divide(model: PreTrainedModel, ranks: Ranks) -> None:
    """Lays a model on meta out over ranks; whoever reads the weights sees from a placement which part to read."""
    experts, layout = find_experts(model), ranks.layout
    refuse_experts(layout, max((module.num_experts for module in experts.values()), default=0))
    if layout.ep > 1:
        for module in experts.values():
            _cut_rows(module, module.num_experts, ranks, ["ep"])
    if layout.dense == "zero3":
        policy = MixedPrecisionPolicy(reduce_dtype=None if model.dtype == torch.float32 else torch.float32)
        if layout.ep > 1:
            for module in experts.values():
                fully_shard(module, mesh=_mesh(ranks, "edp"), mp_policy=policy)
        for block in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=_mesh(ranks, SHARD), mp_policy=policy)
        fully_shard(model.base_model, mesh=_mesh(ranks, SHARD), mp_policy=policy)
        if not model.config.get_text_config().tie_word_embeddings:
            head = model.get_output_embeddings()
            _cut_rows(head, head.out_features, ranks, [SHARD])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by the target tokens of all ranks: gradients are summed, never averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def settle(model: PreTrainedModel, ranks: Ranks) -> None:
    """Puts the exchange of tokens in place where experts are divided, and the gathering of a divided head."""
    layout = ranks.layout
    if layout.ep > 1:
        dispatch = Dispatch(ranks.part("ep").get_group())
        for module in find_experts(model).values():
            module.gatewright_dispatch = dispatch
            module.gatewright_first_expert = ranks.position("ep") * (module.num_experts // layout.ep)
            for name, stack in list(module.named_parameters(recurse=False)):
                if isinstance(stack, DTensor) and layout.dense != "zero3":
                    module.register_parameter(name, nn.Parameter(stack.to_local(), requires_grad=stack.requires_grad))
    if layout.dense == "zero3":
        gather_on_use(model.get_output_embeddings())


def spread_gradients(model: PreTrainedModel, parameters: Named, ranks: Ranks) -> Gradients:
    """Decides for every weight that trains who updates which elements, and in which buckets gradients are summed."""
    if ranks.alone:
        shares = [
            Share(name=n, weight=p, owned=p, piece=Piece(shape=tuple(p.shape), begin=0, end=p.numel()))
            for n, p in parameters.items()
        ]
        return Gradients(shares, [], ranks)
    divided = {
        f"{path}.{name}": module.num_experts
        for path, module in model.named_modules()
        if module in set(find_experts(model).values()) and ranks.layout.ep > 1
        for name, weight in module.named_parameters()
        if weight.shape[0] * ranks.layout.ep == module.num_experts or isinstance(weight, DTensor)
    }
    shares, alike = [], {}
    for name, weight in parameters.items():
        if isinstance(weight, DTensor):
            shares.append(_fsdp_share(name, weight, ranks))
            continue
        share, shard, copies = _plain_share(name, weight, ranks, experts=divided.get(name))
        shares.append(share)
        if shard or copies:
            alike.setdefault((weight.dtype, shard, *copies), []).append((share, shard, copies))
    return Gradients(shares, [bucket for group in alike.values() for bucket in _buckets(group)], ranks)


def _mesh(ranks: Ranks, dimension: str):
    assert ranks.mesh is not None
    return ranks.mesh["copy", dimension] if ranks.layout.copies > 1 else ranks.part(dimension)
