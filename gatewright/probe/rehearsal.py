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
from gatewright.model.head import head_of
from gatewright.model.load import put_seams, read_config, remade_rows
from gatewright.model.quantized_divided import Shares
from gatewright.model.quantized_load import quantizable
from gatewright.model.recompute import recompute
from gatewright.parallel.apply import divider, settle, spread_gradients
from gatewright.parallel.collect import divided_stacks
from gatewright.parallel.layout import Layout
from gatewright.parallel.ranks import Ranks
from gatewright.probe.fake_attention import Stand, stand_in
from gatewright.probe.fake_memory import LiveBytes
from gatewright.probe.fake_quantized import store_nf4
from gatewright.probe.fake_ranks import assume_routing, first_of
from gatewright.probe.rehearsal_observe import first_line, held_after, observe
from gatewright.spec.errors import ModelError, RunFileError
from gatewright.spec.rehearsal import Held, Rehearsal
from gatewright.spec.run import Parallel, Run
from gatewright.train.optim import build_optimizer, trainable
from gatewright.train.setup import refuse_unsupported
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
    refuse_unsupported(run)
    refuse_what_fakes_cannot(run)
    kernel = stand_in(attention_kernel)
    if config is None:
        config = config_of(Path(run.model.path), trust_remote_code=run.model.trust_remote_code)
    batches = [packed_batch(lengths)] * micro_batches
    with first_of(layout) as ranks:
        return observe(
            lambda: build(deepcopy(config), run, kernel, ranks, expert_load=expert_load),
            lambda model, live: take_steps(model, run, batches, live, ranks),
            model=run.model.path,
            trainer="gatewright",
            lengths=tuple(lengths),
            layout=layout.describe(),
            expert_load=expert_load if layout.ep > 1 else None,
            attention=kernel.name,
            spread=lambda model: dict.fromkeys(divided_stacks(model, ranks), layout.ep),
            reach=2 if layout.dense == "zero3" else 0,
            multiple=2 if run.train.checkpointing == "selective" else 1,
            full_depth=full_depth,
        )


def refuse_what_fakes_cannot(run: Run) -> None:
    """Raises RunFileError for settings whose kernels, or whose sizes, only real tensors have."""
    method, router = run.method, run.router
    if router.balance or router.z:
        raise RunFileError(
            "rehearsal: router.balance and router.z need the router's score function, which is told from values; set "
            "both to 0 (they add a few tensors of tokens × experts), or leave out --simulate"
        )
    if router.capacity != "dropless":
        raise RunFileError(
            "rehearsal: with router.capacity the routing decides how many rows are left, and fake tensors have no "
            "routing; set dropless for the upper bound, or leave out --simulate"
        )
    if isinstance(run.parallel, Parallel) and run.parallel.cp != 1:
        raise RunFileError(
            f"rehearsal: parallel.cp {run.parallel.cp}: how documents are cut changes with every micro-batch, and "
            "is not rehearsed; set cp: 1, or leave out --simulate"
        )
    if method.quantize == "fp8":
        raise RunFileError(
            "rehearsal: method.quantize fp8 keeps what is FP8 in the weight files, and a rehearsal reads none; leave "
            "out --simulate, or set nf4 or none"
        )
    if method.adapter is not None and method.adapter.experts is not None:
        raise RunFileError(
            "rehearsal: with method.adapter.experts the routing decides which rows have an adapter, and fake tensors "
            "have no routing; take the key out for the upper bound, or leave out --simulate"
        )


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
    packed = quantizable(model) if run.method.quantize == "nf4" else set()
    shares: Mapping[str, Shares] = {}
    if (divide := divider(ranks)) is not None:
        shares = divide(model, packed, () if packed else remade_rows(model))
        model.tie_weights()  # as the loader does after it
    settle(model, ranks)
    store_nf4(model, packed, shares)
    if ranks.layout.ep > 1:
        assume_routing(model, load=expert_load)
    adapter = run.method.adapter
    if adapter:
        add_adapters(model, adapter, seed=run.train.seed, kept=() if run.router_trains else ("router",))
    else:
        train_weights(model, run.method.roles, router=run.router.train)
    recompute(model, run.train.checkpointing)
    return model


def take_steps(model: PreTrainedModel, run: Run, batches: list[Batch], live: LiveBytes, ranks: Ranks) -> Held:
    """Two optimizer steps; the first brings the optimizer's state into being."""
    parameters = trainable(model)
    with _disable_current_modes():  # who updates what is arithmetic on real numbers
        gradients = spread_gradients(model, parameters, ranks)
    optimizer = build_optimizer(gradients.owned, run.train, weights=parameters)
    for _ in range(2):
        live.begin_step()
        train_step(
            model, head_of(model), optimizer, gradients, batches,
            lr=run.train.lr, clip_norm=run.train.clip_norm, loss_chunk_tokens=run.train.loss_chunk_tokens,
        )  # fmt: skip
    return held_after(
        model,
        trained=[share.weight for share in gradients.shares.values()],
        owned=gradients.owned.values(),
        optimizer=optimizer,
    )
