"""Rehearsal of a run: the trainer's own step on fake tensors, and the bytes each of its phases would allocate."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gatewright.data.batch import IGNORED, Batch
from gatewright.model import attention
from gatewright.model.adapters import add_adapters, train_weights
from gatewright.model.experts import find_experts, set_capacity
from gatewright.model.head import head_of
from gatewright.model.load import put_seams, read_config, remade_rows
from gatewright.model.quantized_divided import Shares
from gatewright.model.recompute import recompute
from gatewright.model.routing import RouterWatch, find_routers
from gatewright.parallel.apply import divide_added, divider, settle, spread_gradients
from gatewright.parallel.collect import whole_shapes
from gatewright.parallel.layout import Layout
from gatewright.parallel.ranks import Ranks
from gatewright.probe.fake_attention import Stand, stand_in
from gatewright.probe.fake_memory import LiveBytes
from gatewright.probe.fake_quantized import few_bits, store
from gatewright.probe.fake_ranks import assume_routing, first_of
from gatewright.probe.fake_routing import assume_experts, score_functions
from gatewright.probe.rehearsal_observe import first_line, held_after, observe
from gatewright.spec.errors import ModelError, RunFileError
from gatewright.spec.rehearsal import Held, Rehearsal
from gatewright.spec.run import Parallel, Run
from gatewright.train.optim import build_optimizer, together, trainable
from gatewright.train.router_loss import RouterLoss
from gatewright.train.setup import capacity_of, refuse_router_settings
from gatewright.train.step import train_step

ONE = Layout()


def rehearse(
    run: Run,
    *,
    lengths: Sequence[int],
    config: PretrainedConfig | None = None,
    micro_batches: int = 1,
    layout: Layout = ONE,
    expert_load: float = 1.0,
    attention_kernel: Stand = "flash",
    full_depth: bool = False,
) -> Rehearsal:
    """Peak bytes of the run's step on the first rank of `layout`, from the model's config: no weights, data or GPU.

    `lengths`: tokens of each document in the micro-batch. `config` replaces that of run.model.path, a folder of which
    only config.json is read. `micro_batches`: from 2 on, gradients are there while a forward pass runs. Deep models run
    at two depths unless `full_depth`. `expert_load`: with expert parallelism, the rows that this rank's experts receive
    over those that they would in perfect balance; fake tensors have no routing to tell it.

    Raises RunFileError for lengths or settings that cannot be rehearsed, ModelError for an architecture that cannot be
    built, trained on packed documents, or run on shapes alone.
    """
    if not lengths or min(lengths) < 2:
        raise RunFileError(
            f"rehearsal: document lengths {list(lengths)[:8]}; give at least one, each of 2 tokens or more"
        )
    if micro_batches < 1:
        raise RunFileError(f"rehearsal: {micro_batches} micro-batches; give at least 1")
    refuse_what_fakes_cannot(run)
    kernel = stand_in(attention_kernel)
    if run.router.capacity != "dropless":
        expert_load = min(expert_load, run.router.capacity)  # no pool of experts takes more
    if config is None:
        config = config_of(Path(run.model.path), trust_remote_code=run.model.trust_remote_code)
    batches = [packed_batch(lengths)] * micro_batches
    with first_of(layout) as ranks:
        scores: dict[int, str] = {}

        def build_once() -> PreTrainedModel:
            model = build(deepcopy(config), run, kernel, ranks, expert_load=expert_load)
            if not scores and (run.router.balance or run.router.z):
                scores.update(score_functions(model))
            return model

        return observe(
            build_once,
            lambda model, live: take_steps(model, run, batches, live, ranks, scores=scores),
            model=run.model.path,
            trainer="gatewright",
            lengths=tuple(lengths),
            layout=layout.describe(),
            assumed=assumptions(run, layout, expert_load),
            attention=kernel.name,
            shapes=lambda model: whole_shapes(model, ranks),
            reach=2 if layout.dense == "zero3" else 0,
            multiple=2 if run.train.checkpointing == "selective" else 1,
            full_depth=full_depth,
        )


def refuse_what_fakes_cannot(run: Run) -> None:
    """Raises RunFileError for settings whose kernels, or whose sizes, only real tensors have."""
    if isinstance(run.parallel, Parallel) and run.parallel.cp != 1:
        raise RunFileError(
            f"rehearsal: parallel.cp {run.parallel.cp}: attention from slices of documents is torch's choice of a "
            "kernel, which differs between GPUs and is not known here; set cp: 1, or leave out --simulate"
        )


def assumptions(run: Run, layout: Layout, expert_load: float) -> tuple[str, ...]:
    """What was assumed of a routing that fake tensors do not have."""
    said = []
    if layout.ep > 1:
        said.append(f"its experts receive {expert_load:g} times the rows of perfect balance (1: balanced routing)")
    if run.router.capacity != "dropless":
        said.append("no row is dropped for want of capacity: an upper bound")
    if run.method.adapter is not None and run.method.adapter.experts is not None:
        said.append("every row goes to an expert that has an adapter: an upper bound")
        if layout.ep > 1 and run.method.adapter.experts.most_routed is not None:
            said.append("as many of the most-routed experts as can lie on one rank do: an upper bound")
    return tuple(said)


def config_of(source: Path | Mapping[str, Any], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config in a folder, or one given as the content of a config.json. Raises ModelError for one unknown."""
    if isinstance(source, Path):
        return read_config(source, trust_remote_code=trust_remote_code)
    values = dict(source)
    try:
        return AutoConfig.for_model(values.pop("model_type", "(no model_type)"), **values)
    except Exception as error:  # transformers checks values with errors of many kinds
        raise ModelError(f"config: transformers cannot read it: {first_line(error)}") from None


def packed_batch(lengths: Sequence[int]) -> Batch:
    """A micro-batch of documents of these lengths, every token but the last of a document a target."""
    labels_T = torch.zeros(sum(lengths), dtype=torch.int64)
    cu_seqlens_S1 = torch.tensor([0, *lengths]).cumsum(0).int()
    labels_T[cu_seqlens_S1[1:].long() - 1] = IGNORED
    return Batch(
        tokens_T=torch.zeros(sum(lengths), dtype=torch.int64),
        labels_T=labels_T,
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens_S1=cu_seqlens_S1,
        lengths=tuple(lengths),
        documents=tuple(range(len(lengths))),
    )


def build(
    config: PretrainedConfig, run: Run, kernel: attention.Kernel, ranks: Ranks, *, expert_load: float = 1.0
) -> PreTrainedModel:
    """The run's model as set_up builds it on this rank, from the config instead of the weights."""
    attention.install(kernel)
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=getattr(torch, run.model.dtype),
        attn_implementation=attention.NAME,
        trust_remote_code=run.model.trust_remote_code,
    )
    put_seams(model, source=run.model.path)
    packed, empty = few_bits(model, config, run.method.quantize, source=run.model.path)
    shares: Mapping[str, Shares] = {}
    if (divide := divider(ranks, whole=run.adapter.full if run.adapter else ())) is not None:
        shares = divide(model, packed, () if packed else remade_rows(model))
        model.tie_weights()  # as the loader does after it
    settle(model, ranks)
    store(model, packed, empty, shares)
    if ranks.layout.ep > 1:
        assume_routing(model, load=expert_load)
    experts, adapter = find_experts(model), run.adapter
    if adapter:
        add_adapters(
            model,
            adapter,
            seed=run.train.seed,
            chosen=assume_experts(run, model),
            kept=() if run.router_trains else ("router",),
            placed=divide_added(model, ranks),
        )
    else:
        train_weights(model, run.method.roles, router=run.router.train)
    recompute(model, run.train.checkpointing)
    if not experts:
        refuse_router_settings(run, model)
    else:
        set_capacity(model, capacity_of(run, experts=max(module.num_experts for module in experts.values())))
    return model


def router_loss(model: PreTrainedModel, run: Run, scores: Mapping[int, str] | None) -> RouterLoss | None:
    """The router's own losses as the trainer has them at its first step; None where they are off."""
    router = run.router
    if not (router.balance or router.z):
        return None
    watch = RouterWatch(find_routers(model, find_experts(model)), scores=scores)
    return RouterLoss(watch=watch, over=router.balance_over, balance=router.balance, z=router.z)


def take_steps(
    model: PreTrainedModel,
    run: Run,
    batches: list[Batch],
    live: LiveBytes,
    ranks: Ranks,
    *,
    scores: Mapping[int, str] | None = None,
) -> Held:
    """Two optimizer steps; the first brings the optimizer's state into being.

    `scores`: layer -> the router's score function, where values cannot tell it.
    """
    router = router_loss(model, run, scores)
    parameters = trainable(model)
    with _disable_current_modes():  # who updates what is arithmetic on real numbers
        gradients = spread_gradients(model, parameters, ranks, unit=together(run.train))
    pieces = {share.name: share.piece for share in gradients.shares.values()}
    optimizer = build_optimizer(gradients.owned, run.train, pieces=pieces)
    for _ in range(2):
        live.begin_step()
        train_step(
            model, head_of(model), optimizer, gradients, batches,
            lr=run.train.lr, clip_norm=run.train.clip_norm, loss_chunk_tokens=run.train.loss_chunk_tokens,
            router=router,
        )  # fmt: skip
    return held_after(
        model,
        trained=[share.weight for share in gradients.shares.values()],
        owned=gradients.owned.values(),
        optimizer=optimizer,
    )
