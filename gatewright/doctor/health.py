"""Health of a run from its step lines: spikes, slowing down, waiting for data, experts out of balance, time left."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gatewright.doctor.cause import Cause, Role
from gatewright.doctor.causes import numerics
from gatewright.doctor.metrics import Point, Series
from gatewright.spec.finding import Finding, Number, Place

SPIKE_RATIO = 1.5
"""A loss so many times the median of the steps before it is a spike, if it also leaves their scatter."""
SPIKE_DEVIATIONS = 8
GRADIENT_SPIKE_RATIO = 10
WINDOW = 25
SLOWER_RATIO = 1.15
DATA_WAIT_SHARE = 0.10
IMBALANCE_RATIO = 3.0
"""Largest over mean load of a layer's experts."""
ENOUGH_TOKENS = 50
"""Tokens an expert would get on average, before its share says anything."""
_FEW = 12
"""Below so many points there is no trend."""


def _page(code: str, name: str, title: str, why: str, fix: str) -> Cause:
    return Cause(
        code=code,
        name=name,
        kind="health",
        title=title,
        role=Role.HINT,
        severity="warning",
        text="",
        why=why,
        fix=(fix,),
    )


PAGES: tuple[Cause, ...] = (
    _page(
        "GW595",
        "loss-spikes",
        "The loss jumps",
        "A step's loss is far above those before it. Single ones come from odd batches; clusters precede divergence.",
        "Look at the batches of those steps; lower the learning rate or clip if they cluster.",
    ),
    _page(
        "GW550",
        "gradient-spikes",
        "The gradient norm jumps",
        "A gradient norm ten times its median moves the weights far, unless clipping holds it.",
        "Clip at about the median; look at the data of those steps.",
    ),
    _page(
        "GW596",
        "slower-and-slower",
        "Steps take longer than they did",
        (
            "Longer samples, a throttled or shared GPU, a growing cache, a network neighbour, or data "
            "workers that fall behind."
        ),
        (
            "Compare clocks and temperatures of the GPUs, and the share of data time, between the first and "
            "the last steps."
        ),
    ),
    _page(
        "GW555",
        "waiting-for-data",
        "The step waits for data",
        "A part of the step's time passes before the batch is there.",
        "Tokenise before the run, more data workers, data on a local disk.",
    ),
    _page(
        "GW599",
        "experts-out-of-balance",
        "Few experts get most tokens",
        "Expert parallelism waits for the fullest rank, and experts without tokens do not learn.",
        "Turn the balance loss on or freeze the router; place experts by load.",
    ),
    _page(
        "GW548",
        "dropped-tokens",
        "Tokens are dropped by the experts' capacity",
        "A dropped token skips its expert: the loss does not show it.",
        "Raise the capacity factor, or train dropless.",
    ),
    _page(
        "GW597",
        "silent",
        "A run that works and says nothing",
        "A collective that never ends, a file system that does not answer, or a node that is gone; a step far longer "
        "than those before it looks the same at first.",
        "Look where it stands: py-spy dump --pid of a rank, squeue for the job, the logs of the other ranks.",
    ),
)
SILENT_S, SILENT_STEPS = 300.0, 20
"""Without a new byte for so long, and for so many of its steps, a run that works is called silent."""
_BY_NAME = {page.name: page for page in PAGES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run is, and when it will end; NaN where the log does not say."""

    step: int | None
    total_steps: int | None
    loss_first: float
    loss_last: float
    step_s: float
    """Median of the last quarter."""

    @property
    def remaining_s(self) -> float:
        if self.step is None or self.total_steps is None:
            return math.nan
        return max(0, self.total_steps - self.step) * self.step_s


def progress(series: Series) -> Progress | None:
    """Progress by the last step line; a progress bar helps with the count and the rate."""
    if series.last is None and not series.bars:
        return None
    bar = _training_bar(series)
    last = series.last or bar
    assert last is not None or series.bars
    counted = last if last is not None and last.step is not None else bar
    losses = [point.loss for point in series.points if math.isfinite(point.loss)]
    seconds = _quarter([point.step_s for point in series.points], last=True)
    if math.isnan(seconds) and bar is not None:
        seconds = bar.step_s
    return Progress(
        step=counted.step if counted else None,
        total_steps=_total(series, counted),
        loss_first=median(losses[:5]) if losses else math.nan,
        loss_last=median(losses[-5:]) if losses else math.nan,
        step_s=seconds,
    )


def _training_bar(series: Series) -> Point | None:
    """The last bar of the longest total: bars of loading and evaluation are shorter, as a rule."""
    totals = [bar.total_steps or 0 for bar in series.bars]
    longest = max(totals, default=0)
    return next((bar for bar in reversed(series.bars) if bar.total_steps == longest), None)


def _total(series: Series, counted: Point | None) -> int | None:
    if counted is None:
        return None
    if counted.total_steps is not None or series.total_steps is not None:
        return counted.total_steps or series.total_steps
    return next((point.total_steps for point in reversed(series.points) if point.total_steps), None)


def health(series: Series, *, file: str) -> list[Finding]:
    """What the step lines show, worst first."""
    points = series.points
    found = [
        *_zeros(series, file),
        *_spikes(points, file),
        *_gradient_spikes(points, file),
        *_slower(points, file),
        *_data_wait(points, file),
        *_dropped(points, file),
        *_imbalance(series, file),
    ]
    return found


def _finding(
    name: str, text: str, file: str, line: int, numbers: Sequence[tuple[str, Number]], count: int = 1
) -> Finding:
    page = _BY_NAME[name]
    return Finding(
        code=page.code,
        name=page.name,
        kind=page.kind,
        severity=page.severity,
        text=text,
        confidence="likely",
        places=(Place(file=file, line=line),),
        occurrences=count,
        numbers=tuple(numbers),
        fix=page.fix,
    )


def silence(found: Progress | None, *, quiet_s: float, file: str) -> Finding | None:
    """A run that trained and has written nothing for `quiet_s` seconds, where that is long for its steps."""
    if found is None:
        return None
    step_s = found.step_s if math.isfinite(found.step_s) else 0.0
    if quiet_s < max(SILENT_S, SILENT_STEPS * step_s):
        return None
    pace = f"; a step takes {step_s:.3g} s" if step_s else ""
    text = f"Nothing was written for {quiet_s / 60:.0f} min{pace}."
    return _finding("silent", text, file, 0, (("quiet_s", round(quiet_s)), ("step_s", step_s)))


def _zeros(series: Series, file: str) -> list[Finding]:
    """Loss or gradient exactly zero: over several steps at the end, or in all there are."""
    found = []
    for name, run in (("loss-zero", series.zero_loss_run), ("gradient-zero", series.zero_grad_run)):
        if len(run) >= 3 or (run and len(run) == len(series.points)):
            cause = next(cause for cause in numerics.CAUSES if cause.name == name)
            steps = f"{len(run)} steps in a row" if len(run) > 1 else "the only step shown"
            found.append(
                Finding(
                    code=cause.code,
                    name=cause.name,
                    kind=cause.kind,
                    severity="error",
                    text=f"{cause.text[:-1]} ({steps}).",
                    confidence="likely" if len(run) >= 3 else "possible",
                    places=(Place(file=file, line=run[0]),),
                    occurrences=len(run),
                    fix=cause.fix,
                )
            )
    return found


def _spikes(points: Sequence[Point], file: str) -> list[Finding]:
    values = [(point.line, point.loss) for point in points if math.isfinite(point.loss)]
    spikes: list[tuple[float, int]] = []
    window: list[float] = []
    for line, loss in values:
        if len(window) == WINDOW:
            middle = median(window)
            scatter = median(abs(value - middle) for value in window)
            if loss > SPIKE_RATIO * middle and loss - middle > SPIKE_DEVIATIONS * scatter and middle > 0:
                spikes.append((loss / middle, line))
                continue  # a spike does not raise the level that the next one is measured by
            window.pop(0)
        window.append(loss)
    if not spikes:
        return []
    worst, line = max(spikes)
    text = f"{len(spikes)} of {len(values)} losses jump above those before them, the worst to {worst:.1f} times."
    return [_finding("loss-spikes", text, file, line, (("worst_ratio", round(worst, 2)),), len(spikes))]


def _gradient_spikes(points: Sequence[Point], file: str) -> list[Finding]:
    norms = [(point.grad_norm, point.line) for point in points if math.isfinite(point.grad_norm)]
    if len(norms) < _FEW:
        return []
    middle = median(norm for norm, _ in norms)
    high = [(norm, line) for norm, line in norms if middle > 0 and norm > GRADIENT_SPIKE_RATIO * middle]
    if not high:
        return []
    worst, line = max(high)
    text = f"{len(high)} gradient norms exceed ten times their median of {middle:.3g}; the largest is {worst:.3g}."
    return [_finding("gradient-spikes", text, file, line, (("median", middle), ("largest", worst)), len(high))]


def _slower(points: Sequence[Point], file: str) -> list[Finding]:
    seconds = [point.step_s for point in points if math.isfinite(point.step_s)]
    if len(seconds) < _FEW:
        return []
    first, last = _quarter(seconds[3:], last=False), _quarter(seconds, last=True)
    if not first or last < SLOWER_RATIO * first:
        return []
    text = f"Steps take {last:.2f} s at the end and took {first:.2f} s at the start: {last / first - 1:.0%} slower."
    return [_finding("slower-and-slower", text, file, points[-1].line, (("first_s", first), ("last_s", last)))]


def _data_wait(points: Sequence[Point], file: str) -> list[Finding]:
    timed = [point for point in points if math.isfinite(point.data_s) and math.isfinite(point.step_s)]
    total_s = math.fsum(point.step_s for point in timed)
    share = math.fsum(point.data_s for point in timed) / total_s if total_s else 0.0
    if len(timed) < _FEW or share < DATA_WAIT_SHARE:
        return []
    return [
        _finding(
            "waiting-for-data",
            f"{share:.0%} of the steps' time is waiting for data.",
            file,
            timed[-1].line,
            (("share", round(share, 3)),),
        )
    ]


def _dropped(points: Sequence[Point], file: str) -> list[Finding]:
    dropping = [point for point in points if point.dropped_tokens]
    if not dropping:
        return []
    dropped, tokens = sum(point.dropped_tokens for point in points), sum(point.tokens for point in points)
    text = f"{dropped:,} tokens were dropped by the experts' capacity, in {len(dropping)} of {len(points)} steps shown."
    return [_finding("dropped-tokens", text, file, dropping[0].line, (("dropped_tokens", dropped), ("tokens", tokens)))]


def _imbalance(series: Series, file: str) -> list[Finding]:
    layers = _summed(series.experts)
    telling = [(row, load) for row, load in enumerate(layers) if sum(load) >= ENOUGH_TOKENS * len(load)]
    ratios = [(max(load) * len(load) / sum(load), row) for row, load in telling]
    if not ratios or series.last is None:
        return []
    worst, row = max(ratios)
    starved = sum(count == 0 for _, load in telling for count in load)
    if worst < IMBALANCE_RATIO and not starved:
        return []
    text = (
        f"The fullest expert gets {worst:.1f} times the mean load (MoE layer {row}, "
        f"last {len(series.experts)} steps shown); {starved} experts got no token."
    )
    numbers = (("worst_ratio", round(worst, 2)), ("starved_experts", starved))
    return [_finding("experts-out-of-balance", text, file, series.last.line, numbers)]


def _summed(steps: Sequence[tuple[tuple[int, ...], ...]]) -> list[list[int]]:
    """Loads over several steps, [layer][expert]; steps of another shape than the last one are left out."""
    if not steps:
        return []
    shape = [len(layer) for layer in steps[-1]]
    alike = [step for step in steps if [len(layer) for layer in step] == shape]
    return [[sum(loads) for loads in zip(*(step[row] for step in alike), strict=True)] for row in range(len(shape))]


def _quarter(values: Sequence[float], *, last: bool) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    size = max(1, len(finite) // 4)
    return median(finite[-size:] if last else finite[:size])
