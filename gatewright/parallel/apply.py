"""Parallelism applied to a model from outside, in one fixed order, on one screen.

    on meta, no bytes read yet      divide             experts cut over ep; zero3: FSDP2 over blocks, embedding and head
    weights read, each its own      settle             experts' dispatch in place, and a head that gathers its weight
    adapters added, one by one      divide_added       zero3: each divided at once, gathered with its block from then on
    roles chosen                    spread_gradients   who updates what, and how gradients meet

Inside the model nothing knows of ranks but the experts seam (model/experts.py), the head (model/head.py) and weights
in few bits (model/quantized_divided.py).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import gcd, prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gatewright.model.experts import find_experts, hold
from gatewright.model.head import decoder, gather_on_use
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_divided import Shares
from gatewright.model.quantized_load import Divide
from gatewright.model.roles import head_is_tied, parameter_roles
from gatewright.parallel.collect import Stack, divided_stacks, expert_stacks
from gatewright.parallel.collectives import all_gather, count_fsdp
from gatewright.parallel.dispatch import Dispatch
from gatewright.parallel.gradients import Bucket, Gradients, Named, Share
from gatewright.parallel.join_fsdp import Place, follow_parametrized, join_fsdp
from gatewright.parallel.layout import refuse_experts
from gatewright.parallel.pieces import Piece
from gatewright.parallel.ranks import SHARD, Ranks
from gatewright.spec.errors import ModelError

Grouped = tuple[Share, dist.ProcessGroup | None, list[dist.ProcessGroup]]
"""A share, the ranks that divide its sum, and the groups that all get it."""
BUCKET_ELEMENTS = 16 << 20
"""Elements that one collective reduces: 64 MiB in float32."""


def divider(ranks: Ranks, *, whole: Collection[str] = ()) -> Divide | None:
    """What the loader is to call with the empty model; None where every rank reads all of it."""
    if ranks.layout.ep == 1 and ranks.layout.dense != "zero3":
        return None
    return lambda model, packed, remade: divide(model, ranks, whole=whole, packed=packed, remade=remade)


def divide(
    model: PreTrainedModel,
    ranks: Ranks,
    *,
    whole: Collection[str] = (),
    packed: Collection[str] = (),
    remade: Collection[str] = (),
) -> dict[str, Shares]:
    """Lays a model on meta out over ranks; whoever reads the weights sees from a placement which part to read.

    `whole`: roles that zero3 leaves whole until `divide_added`: what trains in full beside an adapter is kept in
    float32, in another form than it is read in. `remade`: weights of which a rank cannot read its rows alone; they stay
    whole. `packed`: weights that will be in few bits. FSDP has no part in these: where zero3 divides their packed
    bytes, the ranks that do so are returned by name.
    """
    experts, layout = find_experts(model), ranks.layout
    refuse_experts(layout, max((module.num_experts for module in experts.values()), default=0))
    own = {id(weight) for module in experts.values() for weight in module.parameters()}
    stacks = [name for name, weight in model.named_parameters() if name in remade and id(weight) in own]
    if layout.ep > 1 and stacks:
        raise ModelError(
            f"parallel.ep: {layout.ep}: {stacks[0]} is put together from its files in another order than by expert, so "
            "that a rank cannot read its own experts; set ep: 1"
        )
    if layout.ep > 1:
        for module in experts.values():
            _cut_rows(module, module.num_experts, ranks.part("ep"))
    if layout.dense == "zero3":
        policy = _precision(model)
        packed_weights = {model.get_parameter(name) for name in packed}
        if layout.ep > 1:
            for module in experts.values():
                fully_shard(module, mesh=ranks.with_copies("edp"), mp_policy=policy, ignored_params=packed_weights)
        roles = parameter_roles(model)
        kept = {weight for name, weight in model.named_parameters() if roles[name] in whole or name in remade}
        kept |= packed_weights
        for block in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(block, mesh=ranks.with_copies(SHARD), mp_policy=policy, ignored_params=kept)
        # Left gathered after a forward pass, as FSDP would, its parameters would not be found as shards between steps.
        fully_shard(
            decoder(model), mesh=ranks.with_copies(SHARD), mp_policy=policy, reshard_after_forward=True,
            ignored_params=kept,
        )  # fmt: skip
        head = model.get_output_embeddings()
        if head.weight not in kept and not head_is_tied(model):
            _cut_rows(head, head.out_features, ranks.with_copies(SHARD))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _sum_gradients(module, ranks)
    return _packed_shares(model, packed, ranks) if layout.dense == "zero3" else {}


def _precision(model: PreTrainedModel) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(reduce_dtype=None if model.dtype == torch.float32 else torch.float32)


def _sum_gradients(module: FSDPModule, ranks: Ranks) -> None:
    """The loss is divided by the target tokens of all ranks: gradients are summed, never averaged."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if ranks.device.type == "cpu":
        count_fsdp(module)


def _packed_shares(model: PreTrainedModel, packed: Collection[str], ranks: Ranks) -> dict[str, Shares]:
    """Of each packed weight: the ranks that divide its bytes; those with the same experts, or all of a copy."""
    experts = set(find_experts(model).values()) if ranks.layout.ep > 1 else set()
    same, everything = _shares(ranks.part("edp")), _shares(ranks.part(SHARD))
    shares = {n: same if model.get_submodule(n.rpartition(".")[0]) in experts else everything for n in packed}
    return {name: share for name, share in shares.items() if share.count > 1}


def _shares(mesh: DeviceMesh) -> Shares:
    count, group = mesh.size(), mesh.get_group()

    def gather(mine: Tensor) -> Tensor:
        every = mine.new_empty(count * len(mine))
        all_gather(every, mine, group=group)
        return every

    return Shares(count=count, position=mesh.get_local_rank(), gather=gather)


def settle(model: PreTrainedModel, ranks: Ranks) -> None:
    """Puts the exchange of tokens in place where experts are divided, and the gathering of a divided head."""
    layout = ranks.layout
    if layout.ep > 1:
        dispatch = Dispatch(ranks.part("ep").get_group())
        for module in find_experts(model).values():
            module.gatewright_dispatch = dispatch
            count = module.num_experts // layout.ep
            hold(module, range(module.num_experts), first=ranks.position("ep") * count, count=count)
            for name, stack in list(module.named_parameters(recurse=False)):
                if isinstance(stack, DTensor) and layout.dense != "zero3":
                    module.register_parameter(name, nn.Parameter(stack.to_local(), requires_grad=stack.requires_grad))
    if layout.dense == "zero3":
        gather_on_use(model.get_output_embeddings())


def divide_added(model: PreTrainedModel, ranks: Ranks) -> Callable[[str], None] | None:
    """What is to be called with the path of each module that just got an adapter, or that trains in full beside them.

    None where every rank has all of it. What is whole there is divided over ranks, and gathered with the rest of its
    block from then on; the head's, which is in no block, by itself.
    """
    if ranks.layout.dense != "zero3":
        return None
    policy, experts = _precision(model), set(find_experts(model).values())

    def divide_one(path: str) -> None:
        added: dict[nn.Module | None, list[Place]] = {}
        for inner, module in model.get_submodule(path).named_modules(prefix=path):
            for name, weight in module.named_parameters(recurse=False):
                if weight.numel() and not isinstance(weight, DTensor | QuantizedWeight):
                    added.setdefault(_divided_with(model, inner), []).append((module, name))
        for owner, places in added.items():
            mesh = ranks.with_copies("edp" if ranks.layout.ep > 1 and owner in experts else SHARD)
            if mesh.size(mesh.ndim - 1) == 1:
                continue
            if isinstance(owner, FSDPModule):
                follow_parametrized(owner)
                join_fsdp(owner, places, mesh=mesh, policy=policy)
                _sum_gradients(owner, ranks)
                # What got no gradient on this rank counts as zero, and keeps no other waiting.
                owner.set_reduce_scatter_unused_params(True, recurse=False)
            else:
                _gather_alone(places, mesh)

    return divide_one


def _divided_with(model: PreTrainedModel, path: str) -> nn.Module | None:
    """The nearest module at or above a path that FSDP divides; None: there is none."""
    while path:
        module = model.get_submodule(path)
        if isinstance(module, FSDPModule):
            return module
        path = path.rpartition(".")[0]
    return model if isinstance(model, FSDPModule) else None


def _gather_alone(places: Sequence[Place], mesh: DeviceMesh) -> None:
    """Divides weights that each use gathers by itself."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for module, name in places:
        weight = module.get_parameter(name)
        own = distribute_tensor(weight.data, mesh, placements, src_data_rank=None).to_local().clone()
        cut = DTensor.from_local(own, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())
        module.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))
        if isinstance(module, nn.Linear):
            gather_on_use(module)


def spread_gradients(model: PreTrainedModel, parameters: Named, ranks: Ranks, *, unit: int = 1) -> Gradients:
    """Decides for every weight that trains who updates which elements, and in which buckets gradients are summed.

    `unit`: elements that ZeRO-2 keeps together.
    """
    if ranks.alone:
        whole = {n: Piece(shape=tuple(p.shape), begin=0, end=p.numel()) for n, p in parameters.items()}
        return Gradients([Share(name=n, weight=p, owned=p, piece=whole[n]) for n, p in parameters.items()], [], ranks)
    divided, stacks = divided_stacks(model, ranks), expert_stacks(model, ranks)
    shares: list[Share] = []
    alike: dict[tuple[object, ...], list[Grouped]] = {}
    for name, weight in parameters.items():
        if isinstance(weight, DTensor):
            shares.append(_cut_share(name, weight, ranks, stack=stacks.get(name), own=name in divided))
            continue
        share, shard, copies = _plain_share(name, weight, ranks, stack=divided.get(name), unit=unit)
        shares.append(share)
        if weight.numel() and (shard or copies):  # none of the chosen experts: nor has a rank with the same experts
            alike.setdefault((weight.dtype, shard, *copies), []).append((share, shard, copies))
    return Gradients(shares, [bucket for group in alike.values() for bucket in _buckets(group, unit=unit)], ranks)


def _cut_rows(module: nn.Module, rows: int, mesh: DeviceMesh) -> None:
    """Makes each parameter with so many rows a DTensor cut along them; on meta, so nothing is copied."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    for name, weight in list(module.named_parameters(recurse=False)):
        if weight.shape[0] == rows:
            cut = distribute_tensor(weight, mesh, placements, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut, requires_grad=weight.requires_grad))


def _plain_share(name: str, weight: nn.Parameter, ranks: Ranks, *, stack: Stack | None, unit: int) -> Grouped:
    """The share of a weight that FSDP does not manage, who divides its sum, and who else gets it.

    `stack`: how ranks hold the whole, where the weight is this rank's part of a stack of experts.
    """
    layout, row = ranks.layout, prod(weight.shape[1:])
    begin = 0 if stack is None else stack.first(ranks.position("ep")) * row
    shape = tuple(weight.shape) if stack is None else (len(stack.order), *weight.shape[1:])
    within = SHARD if stack is None else "edp"
    sharing = ranks.part(within).size() if layout.dense != "replicate" else 1
    holders = layout.ranks // (1 if stack is None else layout.ep) // sharing
    piece = Piece(
        shape=shape, begin=begin, end=begin + weight.numel(), order=None if stack is None else stack.order,
        grain=0 if stack is None else row, holders=holders,
        writes=ranks.position("copy") == 0 and (sharing > 1 or ranks.position(within) == 0),
    )  # fmt: skip
    copies = [ranks.part("copy").get_group()] if layout.copies > 1 else []
    if sharing == 1:
        copies = [ranks.part(within).get_group()] * (ranks.part(within).size() > 1) + copies
        return Share(name=name, weight=weight, owned=weight, piece=piece), None, copies
    first, last = piece.cut(sharing, ranks.position(within), unit=unit)
    owned = nn.Parameter(weight.data.view(-1)[first:last], requires_grad=weight.requires_grad)
    piece = replace(piece, begin=begin + first, end=begin + last, grain=gcd(piece.grain, unit))
    return Share(name=name, weight=weight, owned=owned, piece=piece), ranks.part(within).get_group(), copies


def _cut_share(name: str, weight: DTensor, ranks: Ranks, *, stack: Stack | None, own: bool) -> Share:
    """The share of a weight that is cut along its first axis, by FSDP or for the head; `stack`: as above.

    `own`: whether it is an adapter of this rank's experts alone, cut over the ranks that hold the same ones.
    """
    (rows, *_), (first, *_) = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    row, rows_each = prod(weight.shape[1:]), -(-weight.shape[0] // ranks.layout.shard)
    first += stack.first(ranks.position("ep")) if stack and own else 0
    piece = Piece(
        shape=tuple(weight.shape) if stack is None else (len(stack.order), *weight.shape[1:]),
        begin=first * row, end=(first + rows) * row,
        order=None if stack is None else stack.order, grain=row * (rows_each if stack is None else 1),
        holders=ranks.layout.copies, writes=ranks.position("copy") == 0,
    )  # fmt: skip
    owned = nn.Parameter(weight.to_local().detach(), requires_grad=weight.requires_grad)
    return Share(name=name, weight=weight, owned=owned, piece=piece)


def _buckets(alike: list[Grouped], *, unit: int) -> list[Bucket]:
    """Cut into collectives; the model's last weights first, as the backward pass makes their gradients first."""
    buckets: list[Bucket] = []
    size = BUCKET_ELEMENTS
    for share, shard, copies in reversed(alike):
        if size >= BUCKET_ELEMENTS:
            buckets.append(Bucket(shares=[], shard=shard, copies=copies, unit=unit))
            size = 0
        buckets[-1].shares.append(share)
        size += share.weight.numel()
    return buckets
