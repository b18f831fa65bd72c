"""What the report states, as labels and values in words: the text and the page show the same sentences."""

import math
from itertools import takewhile

from gatewright.report import units
from gatewright.report.loads import LayerLoad
from gatewright.report.series import Series
from gatewright.report.summary import Answer, Report, wilson_interval
from gatewright.spec.event import DataLoaded, Evaluated, GateChecked, ModelLoaded

_RANKS_SHOWN = 8
Fact = tuple[str, str]
"""Label and value."""


def headline(report: Report) -> str:
    """The answer in one line: state, steps, time, and what training changed on held-out data."""
    parts = [f"{report.run}: {progress(report)}"]
    if report.before:
        losses = [units.decimal(evaluation.loss, digits=3) for evaluation in _ends(report.evaluations)]
        parts.append(f"held-out loss {' → '.join(losses)}")
    if report.exact_match:
        parts.append(f"exact match {' → '.join(matched(end) for end in _ends(tuple(report.exact_match)))}")
    return "; ".join(parts)


def progress(report: Report) -> str:
    """State, steps and time in words."""
    done, planned = report.steps_done, report.steps_planned
    steps = units.plural(done, "step") if done == planned else f"{units.count(done)} of {units.plural(planned, 'step')}"
    if not planned:
        steps = units.plural(done, "step")
    state = "stopped without a word" if report.state == "silent" else report.state
    if not done:
        return f"{state}, no step yet" + (f" of {units.count(planned)}" if planned else "")
    return f"{state}, {steps} in {units.duration(report.elapsed_s)}"


def state_note(report: Report) -> str:
    """What the reader must know about the state; empty when there is nothing."""
    if report.state == "running" and math.isfinite(report.remaining_s):
        left = units.duration(report.remaining_s)
        return f"The steps still to do take about {left} at the median pace, evaluation and saving not included."
    if report.state == "silent" and report.last_event:
        ago = units.duration((report.read_at - report.last_event).total_seconds())
        return (
            f"The last event was written {ago} before this report, and none says that the run stopped: killed, or hung."
        )
    if report.last_event is None:
        return "events.jsonl holds no event yet."
    return report.detail


def training(report: Report) -> list[Fact]:
    """Steps, tokens, loss and gradient norm."""
    totals, loss, norm = report.totals, report.curves.loss, report.curves.grad_norm
    planned = f" of {units.count(report.steps_planned)}" if report.steps_planned else ""
    facts = [("steps", f"{units.count(report.steps_done)}{planned}")]
    if report.restarts:
        kept = ", ".join("the start" if step == 0 else f"step {units.count(step)}" for step in report.restarts[-6:])
        facts.append(("restarts", f"{len(report.restarts)}, from {kept}"))
    if report.resumes:
        facts.append(("continuity", continuity(report)))
    if report.gate:
        facts.append(("gate", gate(report.gate)))
    if report.void_steps:
        facts.append(("steps done again", f"{units.count(report.void_steps)} ({units.duration(report.void_s)})"))
    if not totals.steps:
        return facts
    target = totals.target_tokens / totals.tokens if totals.tokens else math.nan
    change = f"{units.decimal(loss.mean[0])} → {units.decimal(loss.mean[-1])}"
    if loss.steps_per_bucket > 1:
        change += f" (means of {units.count(loss.steps_per_bucket)} steps)"
    facts += [
        ("tokens", f"{units.count(totals.tokens)}, {units.share(target)} with loss"),
        ("loss, first → last", change),
        ("gradient norm", _range(norm)),
        ("learning rate, peak", units.decimal(max(report.curves.lr.finite, default=math.nan), digits=3)),
    ]
    if len(report.evaluations) > 2:
        best = min(report.evaluations, key=lambda evaluation: evaluation.loss)
        facts.append(("lowest held-out loss", f"{units.decimal(best.loss)}, at step {units.count(best.step)}"))
    for name, series in (("loss", loss), ("gradient norm", norm)):
        if series.not_finite:
            number = units.plural(len(series.not_finite), "step")
            facts.append((f"{name} not finite", f"{number}, first at step {units.count(series.not_finite[0])}"))
    return facts


def throughput(report: Report) -> list[Fact]:
    """Pace, step size and memory."""
    totals = report.totals
    if not totals.steps:
        return []
    facts = [
        ("tokens/s, median of steps", units.count(totals.median_tokens_per_s)),
        ("step, median", units.duration(totals.median_step_s)),
        ("tokens per step, mean", units.count(totals.tokens / totals.steps)),
        ("micro-batches per step", units.decimal(totals.micro_batches / totals.steps, digits=3)),
        ("peak memory", f"{units.memory(totals.peak_memory_bytes)} ({memory_kind(report)})"),
    ]
    facts += ranks(report)
    if report.loads:
        facts.append(("tokens dropped by experts", units.count(totals.dropped_tokens)))
    return facts


def ranks(report: Report) -> list[Fact]:
    """How well the devices were used, and how evenly; what was not measured is left out."""
    totals, facts = report.totals, []
    if totals.median_mfu is not None:
        facts.append(("MFU, median of steps", units.share(totals.median_mfu)))
    if totals.ranks == 1:
        return facts
    facts.append(("tokens/s a rank, median", units.count(totals.median_tokens_per_s / totals.ranks)))
    if totals.median_spread is not None and totals.worst_spread is not None:
        spread = f"{totals.median_spread:.2f} × the median rank's own work; worst step {totals.worst_spread:.2f} ×"
        facts.append(("slowest rank", spread))
    if totals.mean_wait_share is not None:
        facts.append(("time in collectives, mean", units.share(totals.mean_wait_share)))
    facts.append((f"peak by rank, {memory_kind(report)}", _by_rank(totals.rank_memory_bytes)))
    if any(totals.rank_reserved_bytes):
        facts.append(("peak by rank, reserved", _by_rank(totals.rank_reserved_bytes)))
    return facts


def _by_rank(sizes: tuple[int, ...]) -> str:
    """Each size where they are few, else the range and whose the largest is."""
    if len(sizes) <= _RANKS_SHOWN:
        return ", ".join(map(units.memory, sizes))
    fullest = max(range(len(sizes)), key=sizes.__getitem__)
    return f"{units.memory(min(sizes))} to {units.memory(sizes[fullest])} (rank {fullest}), {len(sizes)} ranks"


def memory_kind(report: Report) -> str:
    """What the memory numbers count."""
    on_cpu = report.start is None or report.start.device.lower().startswith("cpu")
    return "resident set of the process" if on_cpu else "allocated on the GPU"


def clock(report: Report) -> list[tuple[str, float]]:
    """(what, seconds) of the time in which a process worked on the run; the last is what nothing else explains."""
    totals = report.totals
    parts = [
        ("data", totals.data_s),
        ("forward", totals.forward_s),
        ("backward", totals.backward_s),
        ("optimizer", totals.optimizer_s),
        ("rest of step", totals.other_s),
        ("steps done again", report.void_s),
        ("evaluation", math.fsum(evaluation.seconds for evaluation in report.evaluations)),
        ("saving", math.fsum(save.waited_s for save in report.saves)),
    ]
    rest_s = report.elapsed_s - math.fsum(seconds for _, seconds in parts)
    return [*parts, ("start-up and rest", max(0.0, rest_s))]


def matched(evaluation: Evaluated) -> str:
    return f"{units.count(evaluation.correct)}/{units.count(evaluation.asked)}"


def evaluation_columns() -> list[str]:
    return ["step", "loss", "perplexity", "exact match", "share", "95 % interval", "time"]


def evaluation_row(evaluation: Evaluated) -> list[str]:
    """The cells of one evaluation; perplexity is e to the loss."""
    perplexity = math.exp(evaluation.loss) if evaluation.loss < 50 else math.inf
    cells = [
        units.count(evaluation.step),
        units.decimal(evaluation.loss),
        units.decimal(perplexity) if math.isfinite(evaluation.loss) else "–",
    ]
    if evaluation.asked:
        low, high = wilson_interval(evaluation.correct, evaluation.asked)
        share = units.share(evaluation.correct / evaluation.asked)
        cells += [matched(evaluation), share, f"{100 * low:.1f}–{100 * high:.1f} %"]
    else:
        cells += ["–", "–", "–"]
    return [*cells, units.duration(evaluation.seconds)]


def data(split: DataLoaded) -> list[Fact]:
    """Size, lengths and what the over-long policy cost."""
    target = split.target_tokens / split.tokens if split.tokens else math.nan
    facts = [
        ("source", split.source),
        ("documents", units.count(split.documents)),
        ("tokens", f"{units.count(split.tokens)}, {units.share(target)} with loss"),
        ("longest document allowed", f"{units.count(split.max_tokens)} tokens"),
    ]
    if split.overlong_documents or split.tokens_lost:
        lost = f"{units.plural(split.overlong_documents, 'document')}, {units.plural(split.tokens_lost, 'token')} lost"
        facts.append((f"over-long ({split.overlong})", lost))
    return facts


def fills(split: DataLoaded) -> list[tuple[str, float, str]]:
    """(what, share of token slots that hold a token, remark) for packing, its bound and padding."""
    slots = split.lower_bound_packs * split.capacity_tokens
    packs = f"{units.count(split.packs)} micro-batches of {units.count(split.capacity_tokens)} tokens"
    rows = [("packed, this run", split.fill, packs)]
    if slots:
        bound = f"no packing needs fewer than {units.count(split.lower_bound_packs)}"
        rows.append(("best possible", min(1.0, split.tokens / slots), bound))
    times = f"{split.fill / split.padded_fill:.2f} × the slots of this run" if split.padded_fill else ""
    return [*rows, ("padded, random order", split.padded_fill, times)]


def model(loaded: ModelLoaded) -> list[Fact]:
    """What was loaded and which kernels run it."""
    trains = loaded.trainable_parameters / loaded.parameters if loaded.parameters else math.nan
    experts = "none: a dense model"
    if loaded.experts:
        experts = (
            f"{loaded.experts} a layer, {loaded.top_k} a token, in {units.plural(len(loaded.moe_layers), 'layer')}"
        )
    facts = [
        ("model", loaded.path),
        ("architecture", f"{loaded.architecture}, {units.plural(loaded.layers, 'layer')}, {loaded.dtype}"),
        ("experts", experts),
        ("parameters", units.count(loaded.parameters)),
        ("trained", f"{units.count(loaded.trainable_parameters)} ({units.share(trains)})"),
        ("attention", loaded.attention),
    ]
    return [*facts, ("experts run by", loaded.experts_kernel)] if loaded.experts else facts


def machine(report: Report) -> list[Fact]:
    """Device and versions of the last process."""
    if report.start is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in report.start.versions.items())
    spread = [("layout", f"{report.layout.layout}: {report.layout.reason}")] if report.layout else []
    return [("device", report.start.device), *spread, ("versions", versions)]


def split_name(split: DataLoaded) -> str:
    return {"evaluate": "held out"}.get(split.split, split.split)


def coverage_columns() -> list[str]:
    return ["role", "trains", "modules", "parameters", "trained", "rank"]


def coverage_row(row: dict[str, int | str | bool]) -> list[str]:
    """The cells of one role of the model."""
    trained, rank = row.get("trainable_parameters", 0), row.get("rank", 0)
    return [
        str(row.get("role", "")),
        "yes" if row.get("trains") else "no",
        *(units.count(int(row.get(name, 0))) for name in ("modules", "parameters")),
        units.count(int(trained)) if trained else "–",
        str(rank) if rank else "–",
    ]


def shared_beginning(answers: list[Answer]) -> str:
    """The whole lines with which every prompt begins, such as a system prompt; empty for one answer."""
    if len(answers) < 2:
        return ""
    prompts = (answer.prompt.splitlines(keepends=True)[:-1] for answer in answers)
    return "".join(lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, zip(*prompts, strict=False)))


def layer_note(layer: LayerLoad) -> str:
    """Dead and starved experts of a layer by number; empty when there are none."""
    parts = [
        f"{len(experts)} {name} ({', '.join(map(str, experts[:6]))}{', …' if len(experts) > 6 else ''})"
        for name, experts in (("dead", layer.dead), ("starved", layer.starved))
        if experts
    ]
    return ", ".join(parts)


def routing_summary(report: Report) -> str:
    """The routing in one sentence; empty for a dense model."""
    if report.loads is None:
        return ""
    layers, worst = report.loads.layers, report.loads.worst
    dead = sum(len(layer.dead) for layer in layers)
    starved = sum(len(layer.starved) for layer in layers)
    experts = units.count(sum(len(layer.load) for layer in layers))
    ill = f"{dead} dead and {starved} starved" if dead or starved else "none dead and none starved"
    return (
        f"The busiest expert had {units.decimal(worst.max_load, digits=3)} × its fair share over the run "
        f"(layer {worst.layer}); of {experts} experts {ill}."
    )


def _ends(evaluations: tuple[Evaluated, ...]) -> tuple[Evaluated, ...]:
    return evaluations if len(evaluations) == 1 else (evaluations[0], evaluations[-1])


def continuity(report: Report) -> str:
    """Whether the steps of all processes follow each other without gap or repeat, and what the resumes proved."""
    steps = "no step missing" if not report.missing_steps else f"{units.plural(report.missing_steps, 'step')} missing"
    resumes = report.resumes
    exact = sum(proved.loss_now == proved.loss_then for proved in resumes)
    worst = max(abs(proved.loss_now - proved.loss_then) / max(abs(proved.loss_then), 1e-9) for proved in resumes)
    loss = "the same loss" if exact == len(resumes) else f"loss within {units.decimal(worst, digits=2)}"
    random = sum(not proved.same_rng for proved in resumes)
    others = f", other random numbers in {random}" if random else ", random numbers"
    return f"{steps}; {units.plural(len(resumes), 'resume')} proved: {loss}, data, learning rate{others}"


def gate(checked: GateChecked) -> str:
    """What the gate predicted."""
    verdict = "hopeless" if checked.hopeless else "on time"
    return (
        f"{verdict} at step {units.count(checked.step)}: {units.duration(checked.needed_s)} needed, "
        f"{units.duration(checked.left_s)} left"
    )


def _range(series: Series) -> str:
    finite = sorted(value for value in series.mean if math.isfinite(value))
    if not finite:
        return "never finite"
    middle, highest = finite[len(finite) // 2], max(series.finite)
    return f"median {units.decimal(middle, digits=3)}, highest {units.decimal(highest, digits=3)}"
