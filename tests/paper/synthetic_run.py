"""Writes the event log of a run that never was: realistic curves, routing of any shape, and accidents on demand."""

import json
import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

BEGIN = datetime(2026, 3, 1, 9, 0, tzinfo=UTC)

VERSIONS = {"gatewright": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.0"}
COVERAGE = [
    {"role": "attention", "trains": True, "modules": 48, "parameters": 10_616_832, "trainable_parameters": 589_824},
    {"role": "experts", "trains": True, "modules": 48, "parameters": 127_401_984, "trainable_parameters": 4_718_592},
    {"role": "router", "trains": False, "modules": 12, "parameters": 27_648, "trainable_parameters": 0},
    {"role": "embeddings", "trains": False, "modules": 1, "parameters": 28_311_552, "trainable_parameters": 0},
]


class Clock:
    """The time stamps of a log; each event happens a little after the one before."""

    def __init__(self) -> None:
        self.now = BEGIN

    def event(self, kind: str, after_s: float, **fields: Any) -> dict[str, Any]:
        self.now += timedelta(seconds=after_s)
        return {"v": 1, "time": self.now.isoformat().replace("+00:00", "Z"), "kind": kind, **fields}


def start(clock: Clock, *, steps: int, resumed_step: int | None = None, run: str = "demo") -> dict[str, Any]:
    return clock.event(
        "start",
        0.4,
        run=run,
        versions=VERSIONS,
        device="CPU (x86_64, 2 threads)",
        threads=2,
        resumed_step=resumed_step,
        steps=steps,
    )


def model(clock: Clock, *, layers: int, experts: int) -> dict[str, Any]:
    return clock.event(
        "model",
        3.1,
        path="cache/smollm2-moe",
        architecture="MixtralForCausalLM" if experts else "LlamaForCausalLM",
        dtype="float32",
        parameters=166_358_016,
        trainable_parameters=5_308_416,
        layers=layers,
        moe_layers=list(range(layers)) if experts else [],
        experts=experts,
        top_k=2 if experts else 0,
        attention="scaled_dot_product_attention, one document at a time",
        experts_kernel="grouped_mm" if experts else "",
        coverage=[
            {**row, "rank": 16 if row["trains"] else 0} for row in COVERAGE if experts or row["role"] != "router"
        ],
    )


def data(clock: Clock, split: str, *, documents: int, overlong: int = 0) -> dict[str, Any]:
    tokens = documents * 311
    packs = -(-tokens // 4000)
    return clock.event(
        "data",
        1.2,
        split=split,
        source=f"examples/demo/{split}.jsonl",
        documents=documents,
        tokens=tokens,
        target_tokens=tokens // 3,
        max_tokens=4096,
        overlong="truncate",
        overlong_documents=overlong,
        tokens_lost=overlong * 812,
        packs=packs,
        capacity_tokens=4096,
        fill=tokens / (packs * 4096),
        lower_bound_packs=-(-tokens // 4096),
        padded_fill=0.412,
    )


def loss_at(step: int, steps: int, noise: random.Random) -> float:
    return 0.82 + 1.5 * math.exp(-6 * step / steps) + noise.gauss(0, 0.05) * (1 + 2 * math.exp(-4 * step / steps))


class Routing:
    """Skewed loads that drift: one layer concentrates on few experts, one expert dies, one starves."""

    def __init__(self, *, layers: int, experts: int, noise: random.Random, tokens: int) -> None:
        self.tokens = tokens
        self.bias = [[noise.gauss(0, 0.18) for _ in range(experts)] for _ in range(layers)]
        self.drift = [[noise.gauss(0, 0.15) for _ in range(experts)] for _ in range(layers)]
        if experts:
            self.drift[layers // 2][0] = 1.2
            self.bias[-1][experts - 1] = -math.inf
            self.bias[-2][1] = -3.2

    def counts(self, progress: float, noise: random.Random) -> list[list[int]]:
        rows = []
        for bias, drift in zip(self.bias, self.drift, strict=True):
            weights = [math.exp(b + d * progress) * noise.uniform(0.9, 1.1) for b, d in zip(bias, drift, strict=True)]
            scale = 2 * self.tokens / sum(weights)
            rows.append([int(weight * scale) for weight in weights])
        return rows


def steps(
    clock: Clock, first: int, last: int, *, of: int, routing: Routing | None, noise: random.Random
) -> Iterator[dict[str, Any]]:
    for step in range(first, last + 1):
        step_s = noise.uniform(2.55, 2.85) + (1.5 if noise.random() < 0.01 else 0)
        yield clock.event(
            "step",
            step_s,
            step=step,
            loss=loss_at(step, of, noise),
            lr=2e-4 * min(1.0, step / (0.05 * of + 1)) * 0.5 * (1 + math.cos(math.pi * step / of)),
            grad_norm=abs(noise.gauss(0.6, 0.1)) + 2 * math.exp(-8 * step / of),
            tokens=8192 - noise.randrange(200),
            target_tokens=2700 + noise.randrange(100),
            micro_batches=2,
            step_s=step_s,
            data_s=0.01,
            forward_s=step_s * 0.31,
            backward_s=step_s * 0.62,
            optimizer_s=step_s * 0.05,
            memory_bytes=int(1.9e9 + 3e8 * (1 - math.exp(-step / 10))),
            dropped_tokens=0,
            expert_tokens=routing.counts(step / of, noise) if routing else [],
        )


def evaluated(clock: Clock, step: int, *, of: int, noise: random.Random, asked: int = 64) -> dict[str, Any]:
    correct = round(asked * (0.05 + 0.6 * (1 - math.exp(-4 * step / of))))
    samples = [
        {
            "prompt": f"What is {a} + {b}?",
            "expected": str(a + b),
            "answer": str(a + b) if step and a != 31 else "I think 7.",
        }
        for a, b in ((12, 30), (31, 11), (5, 9))
    ]
    return clock.event(
        "evaluate",
        8.2,
        step=step,
        loss=loss_at(step, of, noise) + 0.03,
        target_tokens=18_211,
        asked=asked,
        correct=correct if asked else 0,
        samples=samples if asked else [],
        seconds=8.2,
    )


def saved(clock: Clock, step: int, *, best: bool = False) -> dict[str, Any]:
    path = f"checkpoints/step-{step:08d}"
    return clock.event("save", 0.3, step=step, path=path, bytes=64_123_904, seconds=0.3, best=best)


def whole_run(*, total: int = 120, layers: int = 12, experts: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """A finished run in the trainer's order: evaluated before, in the middle and after, saved twice."""
    noise, clock = random.Random(seed), Clock()
    routing = Routing(layers=layers, experts=experts, noise=noise, tokens=8000) if experts else None
    events = [
        clock.event(
            "finding", 0.0, severity="note", text="3 documents were longer than 4,096 tokens and were truncated"
        ),
        data(clock, "train", documents=4000, overlong=3),
        data(clock, "evaluate", documents=200),
        model(clock, layers=layers, experts=experts),
        start(clock, steps=total),
        evaluated(clock, 0, of=total, noise=noise),
    ]
    half = total // 2
    events += steps(clock, 1, half, of=total, routing=routing, noise=noise)
    events += [evaluated(clock, half, of=total, noise=noise, asked=0), saved(clock, half, best=True)]
    events += steps(clock, half + 1, total, of=total, routing=routing, noise=noise)
    events += [evaluated(clock, total, of=total, noise=noise), saved(clock, total, best=True)]
    return [*events, clock.event("stop", 0.1, step=total, reason="finished", detail="")]


def failed_run() -> list[dict[str, Any]]:
    """87 of 200 steps, a kill, a restart from step 60, and NaN at step 103."""
    noise, clock = random.Random(1), Clock()
    routing = Routing(layers=20, experts=128, noise=noise, tokens=8000)
    events = [
        data(clock, "train", documents=4000),
        model(clock, layers=20, experts=128),
        start(clock, steps=200, run="judge"),
        evaluated(clock, 0, of=200, noise=noise),
        *steps(clock, 1, 87, of=200, routing=routing, noise=noise),
    ]
    clock.now += timedelta(hours=2)
    events += [data(clock, "train", documents=4000), model(clock, layers=20, experts=128)]
    events.append(start(clock, steps=200, resumed_step=60, run="judge"))
    events += steps(clock, 61, 103, of=200, routing=routing, noise=noise)
    events[-1]["loss"] = events[-1]["grad_norm"] = float("nan")
    text = "the loss of step 103 is NaN; its batch is saved in [bad]/step-00000103"
    events.append(clock.event("finding", 0, severity="error", text=text))
    return [*events, clock.event("stop", 0, step=103, reason="failed", detail="the loss of step 103 is NaN")]


def write_run(folder: Path, events: list[dict[str, Any]], *, run_file: str | None = "run: demo\n") -> Path:
    """Writes events.jsonl and run.yaml into the folder, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(lines, encoding="utf-8")
    if run_file is not None:
        (folder / "run.yaml").write_text(run_file, encoding="utf-8")
    return folder
