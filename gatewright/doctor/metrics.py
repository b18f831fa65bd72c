"""The numbers a trainer prints each step, in the forms of Gatewright, Hugging Face, Megatron and progress bars."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from gatewright.doctor.cause import Sign, sign

SIGNS: tuple[Sign, ...] = (
    sign("'loss'"),
    sign('"kind": "step"', '"kind":"step"'),
    sign("lm loss"),
    sign("it/s", "s/it"),
    sign("loss "),
)
KEEP_POINTS = 4096
"""Above this every second point is forgotten, so that any log fits."""

_PAIR = re.compile(r"'([a-z_/]+)': '?(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf|NaN|Infinity))'?")
_MEGATRON = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|")
_MEGATRON_PAIR = re.compile(r"(elapsed time per iteration \(ms\)|lm loss|grad norm|learning rate): *([-\d.Ee+naNif]+)")
_BAR = re.compile(r"(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d+)<[^,\]]*, *([\d.]+)(s/it|it/s)")
_OURS = re.compile(r"\bstep\s+(\d+)/(\d+)\s+loss (\S+)(?:\s+lr (\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one line says of one step; NaN where it does not say."""

    line: int
    step: int | None = None
    total_steps: int | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    lr: float = math.nan
    step_s: float = math.nan
    data_s: float = math.nan
    tokens: int = 0
    dropped_tokens: int = 0
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    bar: bool = False
    """Of a progress bar: it may be one of evaluation or loading."""


@dataclass(slots=True)
class Series:
    """Points of one log, thinned; what must not be missed is counted as it comes."""

    points: list[Point] = field(default_factory=list)
    bars: list[Point] = field(default_factory=list)
    seen: int = 0
    zero_loss_run: list[int] = field(default_factory=list)
    """Lines of the steps at the end whose loss is exactly 0."""
    zero_grad_run: list[int] = field(default_factory=list)
    last: Point | None = None
    total_steps: int | None = None
    """Where the log says it apart from the steps."""
    experts: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    """Expert counts of the last few steps."""
    _stride: int = 1

    def add(self, point: Point) -> None:
        """Take in one line."""
        self.seen += 1
        if point.bar:
            _thinned(self.bars, point)
            return
        self.last = point
        _run(self.zero_loss_run, point.loss == 0.0, point.line)
        _run(self.zero_grad_run, point.grad_norm == 0.0, point.line)
        if point.expert_tokens:
            self.experts = [*self.experts[-9:], point.expert_tokens]
        if self.seen % self._stride == 0 and _thinned(self.points, point):
            self._stride *= 2


def _run(lines: list[int], holds: bool, line: int) -> None:
    if not holds:
        lines.clear()
    elif len(lines) < 1000:
        lines.append(line)


def _thinned(points: list[Point], point: Point) -> bool:
    points.append(point)
    if len(points) <= KEEP_POINTS:
        return False
    del points[1::2]
    return True


def read_point(raw: bytes, line: int) -> Point | None:
    """The numbers of a line, or None where it has none of a training step."""
    if raw.lstrip().startswith(b"{") and b'"kind"' in raw[:200]:
        return _event(raw, line)
    text = raw[:4000].decode("utf-8", "replace")
    if "'loss'" in text:
        pairs = {key: _number(value) for key, value in _PAIR.findall(text)}
        if "loss" not in pairs:
            return None
        return Point(
            line=line,
            loss=pairs["loss"],
            grad_norm=pairs.get("grad_norm", math.nan),
            lr=pairs.get("learning_rate", math.nan),
        )
    if found := _MEGATRON.search(text):
        pairs = {key: _number(value) for key, value in _MEGATRON_PAIR.findall(text)}
        return Point(
            line=line,
            step=int(found[1][:18]),
            total_steps=int(found[2][:18]),
            loss=pairs.get("lm loss", math.nan),
            grad_norm=pairs.get("grad norm", math.nan),
            lr=pairs.get("learning rate", math.nan),
            step_s=pairs.get("elapsed time per iteration (ms)", math.nan) / 1000,
        )
    if found := _BAR.search(text):
        rate = _number(found[6])
        seconds = rate if found[7] == "s/it" else (1 / rate if rate else math.nan)
        return Point(line=line, step=int(found[1][:18]), total_steps=int(found[2][:18]), step_s=seconds, bar=True)
    if found := _OURS.search(text):
        return Point(
            line=line,
            step=int(found[1][:18]),
            total_steps=int(found[2][:18]),
            loss=_number(found[3]),
            lr=_number(found[4] or "nan"),
        )
    return None


def _event(raw: bytes, line: int) -> Point | None:
    try:
        event: dict[str, Any] = json.loads(raw)
        if event["kind"] != "step":
            return None
        return Point(
            line=line,
            step=int(event["step"]),
            loss=float(event["loss"]),
            grad_norm=float(event["grad_norm"]),
            lr=float(event["lr"]),
            step_s=float(event["step_s"]),
            data_s=float(event["data_s"]),
            tokens=int(event["tokens"]),
            dropped_tokens=int(event["dropped_tokens"]),
            expert_tokens=tuple(tuple(int(count) for count in layer) for layer in event.get("expert_tokens", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
