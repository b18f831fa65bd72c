"""Everything a run needs, built in one fixed order: data, model, adapters, proofs, optimizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gatewright.data.loader import Loader
from gatewright.data.store import TokenStore, build_store
from gatewright.data.template import Renderer
from gatewright.data.tokenizer import load_tokenizer
from gatewright.data.view import DocumentView
from gatewright.model.adapter_files import load_adapter
from gatewright.model.adapters import add_adapters, train_weights
from gatewright.model.attention import choose_kernel
from gatewright.model.base_files import base_fingerprint, refuse_nan
from gatewright.model.capacity import Capacity
from gatewright.model.coverage import Coverage, by_role, coverage
from gatewright.model.experts import find_experts, set_capacity
from gatewright.model.head import Head, head_of
from gatewright.model.load import check_weights, load_model, read_config
from gatewright.model.per_document import describe
from gatewright.model.recompute import recompute
from gatewright.packing.epoch import EpochPlan
from gatewright.packing.lengths import padded_fill
from gatewright.parallel.apply import divide_added, divider, settle, spread_gradients
from gatewright.parallel.collect import whole_adapters, whole_shapes
from gatewright.parallel.gradients import Gradients
from gatewright.parallel.ranks import Ranks, alone
from gatewright.spec.auto import AUTO_MICRO_BATCH_TOKENS
from gatewright.spec.errors import RunFileError
from gatewright.spec.event import DataLoaded, Event, Finding, ModelLoaded
from gatewright.spec.run import Parallel, Run
from gatewright.train.choose_experts import choose_experts
from gatewright.train.context import context_parallel, cut_of, exchanges_of, prove_context
from gatewright.train.device import pick_device
from gatewright.train.eight_bit import left_in_float32
from gatewright.train.evaluate import Question, questions_of
from gatewright.train.heap import return_free_pages
from gatewright.train.optim import Named, build_optimizer, together, trainable
from gatewright.train.place_experts import place_experts
from gatewright.train.prove import prove_head, prove_isolation
from gatewright.train.router import RouterControl
from gatewright.train.router_findings import router_findings
from gatewright.train.waiting import advice_on_waiting

RANK_SEEDS = 1_000_003
"""Between the seeds of two ranks: their dropout must not be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """All parts of a run in this process."""

    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    head: Head
    ranks: Ranks
    parameters: Named
    """Weights that train, as the model holds them on this rank."""
    gradients: Gradients
    """What this rank updates of them, and how it gets their gradients."""
    coverage: list[Coverage]
    """What trains, by role and layer."""
    optimizer: torch.optim.Optimizer
    loader: Loader
    held_out: Loader | None
    questions: list[Question]
    steps: int
    moe_layers: list[int]
    router: RouterControl | None
    """None for a dense model."""
    fingerprint: dict[str, str]
    """What a resumed run must find unchanged: the data and the base model."""


def set_up(run: Run, *, log: Callable[[Event], None], ranks: Ranks | None = None) -> Trainer:
    """Builds the run's parts; what the user should know of each goes to `log` before the first step.

    `ranks`: this process among the others; None: it is alone.
    """
    if run.train.threads:
        torch.set_num_threads(run.train.threads)
    ranks = ranks or alone(pick_device())
    device = ranks.device
    torch.manual_seed(run.train.seed + RANK_SEEDS * ranks.rank)
    # Data first: its mistakes are the most common, and cost little to find.
    documents = _prepare_data(run, ranks=ranks, log=log)
    model, head, covered = _prepare_model(run, documents.loader, ranks=ranks, log=log)
    router = _prepare_router(run, model, documents.held_out or documents.loader, ranks=ranks, log=log)
    parameters = trainable(model)
    gradients = spread_gradients(model, parameters, ranks, unit=together(run.train))
    pieces = {share.name: share.piece for share in gradients.shares.values()}
    if run.train.optimizer == "adamw8bit" and (note := left_in_float32(pieces.values())):
        log(note)
    fingerprint = {"data": documents.fingerprint, "base model": base_fingerprint(Path(run.model.path))}
    return Trainer(
        device=device,
        tokenizer=documents.tokenizer,
        model=model,
        head=head,
        ranks=ranks,
        parameters=parameters,
        gradients=gradients,
        coverage=covered,
        optimizer=build_optimizer(
            gradients.owned, run.train, router=router.parameters if router else (), pieces=pieces
        ),
        loader=documents.loader,
        held_out=documents.held_out,
        questions=documents.questions,
        steps=documents.steps,
        moe_layers=sorted(find_experts(model)),
        router=router,
        fingerprint=fingerprint,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Documents:
    tokenizer: PreTrainedTokenizerBase
    loader: Loader
    steps: int
    held_out: Loader | None
    questions: list[Question]
    fingerprint: str


def _prepare_data(run: Run, *, ranks: Ranks, log: Callable[[Event], None]) -> _Documents:
    folder = Path(run.model.path)
    config = read_config(folder, trust_remote_code=run.model.trust_remote_code)
    check_weights(folder)
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer, template=run.data.chat_template)
    tokens_dir, vocab_size = Path(run.runs_dir) / ".tokens", config.get_text_config().vocab_size

    with ranks.first_alone():  # the others then find the tokens in the store
        store = build_store(Path(run.data.train), renderer=renderer, root=tokens_dir, vocab_size=vocab_size)
    view = store.limit(run.data.max_tokens, run.data.overlong)
    cut = cut_of(run, view, config, ranks=ranks)
    capacity = _micro_batch_tokens(run, view) if cut is None else run.train.tokens_per_step
    per_step = max(1, round(run.train.tokens_per_step / (capacity if run.data.pack else float(view.lengths.mean()))))
    plan = EpochPlan(
        view.lengths,
        capacity=capacity,
        seed=run.train.seed,
        pack=run.data.pack,
        alike_per_step=per_step if run.data.alike else None,
    )
    _announce(log, run, "train", store, view, plan)
    if cut is None and not ranks.alone and (advice := advice_on_waiting(plan, config, per_step, ranks=ranks)):
        log(advice)
    if per_step < ranks.size and cut is None:
        text = (
            f"a step has {per_step} micro-batches of {capacity:,} tokens for {ranks.size} ranks: some always idle; "
            f"raise train.tokens_per_step to {ranks.size * capacity:,}, or lower train.micro_batch_tokens"
        )
        log(Finding(severity="warning", text=text))
    steps = run.train.steps or math.ceil((run.train.epochs or 1) * plan.packs_per_epoch / per_step)

    held_out, questions = None, []
    if run.evaluate:
        with ranks.first_alone():
            other = build_store(Path(run.evaluate.data), renderer=renderer, root=tokens_dir, vocab_size=vocab_size)
        other_view = other.limit(view.max_tokens, run.data.overlong)
        room = max(capacity, int(other_view.lengths.max())) if cut is None else ranks.size * cut.capacity
        other_plan = EpochPlan(other_view.lengths, capacity=room, seed=0, pack=run.data.pack)
        _announce(log, run, "evaluate", other, other_view, other_plan)
        held_out = Loader(
            view=other_view, plan=other_plan, packs_per_step=1, rank=ranks.rank, ranks=ranks.size, cut=cut
        )
        questions = questions_of(other_view, count=run.evaluate.exact_match or 0)
    return _Documents(
        tokenizer=tokenizer,
        loader=Loader(view=view, plan=plan, packs_per_step=per_step, rank=ranks.rank, ranks=ranks.size, cut=cut),
        steps=steps,
        held_out=held_out,
        questions=questions,
        fingerprint=store.fingerprint,
    )


def _prepare_model(
    run: Run, loader: Loader, *, ranks: Ranks, log: Callable[[Event], None]
) -> tuple[PreTrainedModel, Head, list[Coverage]]:
    device = ranks.device
    kernel = choose_kernel(device, getattr(torch, run.model.dtype))
    model = load_model(
        run.model,
        device=device,
        kernel=kernel,
        quantize=run.method.quantize,
        note=lambda text: log(Finding(severity="note", text=text)),
        divide=divider(ranks, whole=run.adapter.full if run.adapter else ()),
    )
    settle(model, ranks)
    if not find_experts(model):
        refuse_router_settings(run, model)
    whole = whole_shapes(model, ranks)
    base_parameters = sum(math.prod(whole.get(name, p.shape)) for name, p in model.named_parameters())
    refuse_nan(model, source=run.model.path)
    if run.router.placement == "measured":
        log(place_experts(run, model, loader.every_rank(), ranks=ranks))
    _let_train(run, model, loader.every_rank(), ranks=ranks, log=log)
    covered = coverage(model, optimizer=run.train.optimizer, whole=whole_shapes(model, ranks))
    recompute(model, run.train.checkpointing)
    head = head_of(model)
    model.eval()
    prove_isolation(model, device=device)
    prove_head(model, head, device=device)
    if context_parallel(run) and not ranks.alone:
        assert isinstance(run.parallel, Parallel)
        prove_context(model, ranks, exchanges=exchanges_of(run.parallel.exchange))
    return_free_pages()  # what reading and proving took

    experts = find_experts(model)
    config = model.config.get_text_config().to_dict()
    log(
        ModelLoaded(
            path=run.model.path,
            architecture=type(model).__name__,
            dtype=run.model.dtype,
            parameters=base_parameters,
            trainable_parameters=sum(row.trainable_parameters for row in covered),
            layers=config.get("num_hidden_layers", 0),
            moe_layers=sorted(experts),
            experts=max((module.num_experts for module in experts.values()), default=0),
            top_k=config.get("num_experts_per_tok") or config.get("moe_topk") or 0,
            attention="; ".join([f"{kernel.name} ({kernel.reason})", *describe(model, device)]),
            experts_kernel="grouped_mm" if experts else "none",
            coverage=by_role(covered),
        )
    )
    return model, head, covered


def _let_train(run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks, log: Callable[[Event], None]) -> None:
    """Adapters in place and the weights that train unfrozen, as the run file says."""
    adapter = run.adapter
    if adapter is None:
        train_weights(model, run.method.roles, router=run.router.train)
        return
    chosen = choose_experts(run, model, loader, ranks=ranks)
    notes = add_adapters(
        model,
        adapter,
        seed=run.train.seed,
        chosen=chosen.layers if chosen else None,
        kept=() if run.router_trains else ("router",),
        placed=divide_added(model, ranks),
    )
    for note in [*notes, *([chosen.note] if chosen else [])]:
        log(Finding(severity="note", text=note))
    if adapter.start:
        with whole_adapters(model, ranks) as parts:
            load_adapter(model, adapter, Path(adapter.start), base=run.model.path, parts=parts)


def refuse_router_settings(run: Run, model: PreTrainedModel) -> None:
    """Raises RunFileError for settings of a router that this dense model does not have."""
    router = run.router
    asked = {
        "train": router.train, "balance": router.balance, "z": router.z, "bias_rate": router.bias_rate,
        "capacity": router.capacity != "dropless", "placement": router.placement != "contiguous",
        "guard.action": router.guard.action,
    }  # fmt: skip
    if keys := [f"router.{key}" for key, value in asked.items() if value]:
        raise RunFileError(
            f"{', '.join(keys)}: {type(model).__name__} is a dense model and has no router; leave it out"
        )


def _prepare_router(
    run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks, log: Callable[[Event], None]
) -> RouterControl | None:
    """None for a dense model."""
    if not find_experts(model):
        return None
    control = RouterControl(run, model, loader.every_rank(), ranks=ranks)
    ep = run.parallel.ep if isinstance(run.parallel, Parallel) else 1
    for finding in router_findings(control, ep=ep):
        log(finding)
    set_capacity(model, capacity_of(run, experts=control.experts))
    return control


def capacity_of(run: Run, *, experts: int) -> Capacity | None:
    """What bounds the rows of a layer's experts; None: nothing."""
    router, ep = run.router, run.parallel.ep if isinstance(run.parallel, Parallel) else 1
    if router.capacity == "dropless":
        return None
    pool = experts // ep if router.capacity_per == "rank" else 1
    return Capacity(factor=router.capacity, experts_per_pool=pool, drop=router.drop)


def _micro_batch_tokens(run: Run, view: DocumentView) -> int:
    """Capacity of a micro-batch. Raises RunFileError when a document cannot fit, or a step holds no micro-batch."""
    longest, wanted = int(view.lengths.max()), run.train.micro_batch_tokens
    if wanted == "auto":
        return max(longest, min(run.train.tokens_per_step, AUTO_MICRO_BATCH_TOKENS))
    if wanted < longest:
        raise RunFileError(
            f"train.micro_batch_tokens = {wanted:,} cannot hold the longest document of {longest:,} tokens; raise it, "
            f"or lower data.max_tokens"
        )
    if wanted > run.train.tokens_per_step:
        raise RunFileError(
            f"train.micro_batch_tokens = {wanted:,} is more than "
            f"train.tokens_per_step = {run.train.tokens_per_step:,}; a step is made of whole micro-batches"
        )
    return wanted


def _announce(
    log: Callable[[Event], None], run: Run, split: str, store: TokenStore, view: DocumentView, plan: EpochPlan
) -> None:
    log(_describe_data(split, store.source, run, view, plan))
    # What the template, the tokenizer and the length limit leave out of the loss is said aloud.
    for count, what in (
        (view.untrained_documents, "rows hold nothing to learn and are left out"),
        (store.dropped_reasoning, "turns lose their reasoning: the template drops it where a user message follows"),
        (store.straddling_tokens, "tokens hold the end of a prompt and the first words of an answer: no loss on them"),
    ):
        if count:
            log(Finding(severity="note", text=f"{store.source}: {count:,} {what}"))


def _describe_data(split: str, source: str, run: Run, view: DocumentView, plan: EpochPlan) -> DataLoaded:
    packs = plan.packs(0)
    tokens = int(view.lengths.sum())
    return DataLoaded(
        split=split,
        source=source,
        documents=len(view.lengths),
        tokens=tokens,
        target_tokens=view.target_tokens,
        max_tokens=view.max_tokens,
        overlong=run.data.overlong,
        overlong_documents=view.overlong_documents,
        tokens_lost=view.tokens_lost,
        packs=plan.packs_per_epoch,
        capacity_tokens=plan.capacity,
        fill=packs.fill,
        lower_bound_packs=packs.lower_bound,
        padded_fill=padded_fill(view.lengths, batch_size=max(1, round(len(view.lengths) / plan.packs_per_epoch))),
    )
