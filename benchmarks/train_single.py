"""Measures `gatewright train` against TRL's SFTTrainer + PEFT: speed, memory and loss curve, in one run, as ratios.

    python benchmarks/train_single.py [--quick | --packed] [--json FILE] [--model FOLDER] [--dtype float32|bfloat16]

Every contestant trains the same documents in a child process of its own, round after round, so that a change in the
machine's mood meets all of them. docs/benchmarks.md says what is measured and how to read it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from documents import long_tailed_lengths, natural_documents, word_documents, write_texts
from measure import matmul_rate
from models import END, Work, first_adapter, make_tiny_moe, useful_flops, words

HERE = Path(__file__).parent
RANK, ALPHA, LR, MAX_TOKENS, STEP_DOCUMENTS = 16, 32, 1e-3, 4096, 16
GIB = 2.0**30
OURS, DEFAULT = "gatewright", "TRL default (padded, batch 8)"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A trainer with one setting."""

    script: str
    settings: dict[str, Any] = field(default_factory=dict)
    model_settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    """Documents (or packs) in one of TRL's micro-batches; gradients accumulate to STEP_DOCUMENTS a step."""
    packs: bool = False
    copies: int = 1
    """How often each document occurs in this contestant's data, which then takes so many steps to pass."""


FAST = {"gradient_checkpointing": False}
CONTESTANTS = {
    OURS: Contestant(script="contestant_gatewright.py"),
    DEFAULT: Contestant(script="contestant_trl.py", batch=8),
    "TRL batch 8, no recomputation": Contestant(script="contestant_trl.py", batch=8, settings=FAST),
    "TRL batch 1": Contestant(script="contestant_trl.py", settings=FAST),
    # Batches of four equal lengths: the most that group_by_length can reach on any amount of data.
    "TRL grouped by length, batch 4": Contestant(
        script="contestant_trl.py", batch=4, copies=4, settings=FAST | {"train_sampling_strategy": "group_by_length"}
    ),
    "TRL packing bfd": Contestant(script="contestant_trl.py", packs=True, settings=FAST | {"packing": True}),
    "TRL padding-free, batch 4": Contestant(
        script="contestant_trl.py", batch=4, settings=FAST | {"padding_free": True, "max_length": None}
    ),
    "TRL packing wrapped": Contestant(
        script="contestant_trl.py", packs=True, settings=FAST | {"packing": True, "packing_strategy": "wrapped"}
    ),
    "TRL batch 1, experts eager": Contestant(
        script="contestant_trl.py", settings=FAST, model_settings={"experts_implementation": "eager"}
    ),
}
PADDED, PACKED = (
    "TRL batch 8, no recomputation",
    ("TRL packing bfd", "TRL padding-free, batch 4", "TRL packing wrapped"),
)
TARGETS = {"padded": 2.5, "memory": 0.5, "default": 2.5, "packed": 1.2}
"""Times the speed of each; memory is the largest share of a padded peer's."""
QUICK = (OURS, DEFAULT, "TRL batch 1", "TRL grouped by length, batch 4")


@dataclass(kw_only=True)
class Measured:
    """A contestant's numbers over all rounds."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    step_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    leak: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)

    def add(self, result: dict[str, Any], *, warm_up_steps: int) -> None:
        tokens = result["tokens"][warm_up_steps:]
        total = sum(tokens)
        if len(set(result["tokens"])) > 1:  # steps of unlike size: only a whole pass says anything
            self.tokens_per_s.append(total / sum(result["step_s"][warm_up_steps:]))
            self.tokens_per_cpu_s.append(total / sum(result["step_cpu_s"][warm_up_steps:]))
        else:
            self.tokens_per_s += [n / s for n, s in zip(tokens, result["step_s"][warm_up_steps:], strict=True)]
            self.tokens_per_cpu_s += [n / s for n, s in zip(tokens, result["step_cpu_s"][warm_up_steps:], strict=True)]
        self.peak_bytes.append(result["peak_bytes"])
        self.step_bytes.append(result["peak_bytes"] - result["loaded_bytes"])
        self.losses = result["losses"]
        self.leak = max(self.leak, result.get("leak", 0.0))
        for phases in result.get("phases_s", [])[warm_up_steps:]:
            for phase, seconds in phases.items():
                self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
        self.last = result

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def cpu_speed(self) -> float:
        return statistics.median(self.tokens_per_cpu_s)

    @property
    def isolates(self) -> bool:
        """A log-probability may move by rounding when a neighbour changes how many rows an expert gets, not by more."""
        return self.leak < 1e-3 if self.last.get("dtype", "float32") == "float32" else self.leak < 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all contestants."""

    model: Path
    dtype: str
    threads: int
    folder: Path
    lengths: list[int]
    parity_lengths: list[int]


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="gatewright-bench-") as temporary:
        setting = prepare(args, Path(temporary))
        names = QUICK if args.quick else (OURS, DEFAULT, PADDED, *PACKED) if args.packed else tuple(CONTESTANTS)
        print("\n".join(header(setting)), flush=True)
        measured = {name: Measured() for name in names}
        rates: list[float] = []
        for round_number in range(1 if args.quick or args.packed else args.rounds):
            # Every setting has its turn in the first round; after that only those that can still be an answer.
            again = names if round_number == 0 else (OURS, DEFAULT, best_of(measured))
            for name in again:
                rates.append(max(machine_rates(setting)))
                result = compete(name, setting, steps=2)
                measured[name].add(result, warm_up_steps=0 if CONTESTANTS[name].copies > 1 else 1)
                print(
                    f"  round {round_number + 1}: {name}: {measured[name].tokens_per_s[-1]:,.0f} tokens/s", flush=True
                )
        parity = compare_losses(setting, steps=4 if args.quick or args.packed else 12)
        report = summarise(setting, measured, max(rates), parity)
    print("\n".join([*table(measured, report), *([] if args.quick else packed_lines(measured, report))]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer contestants, one round")
    parser.add_argument("--packed", action="store_true", help="ours, TRL padded and TRL packed only, one round")
    parser.add_argument("--json", metavar="FILE", help="write every number to FILE")
    parser.add_argument("--model", metavar="FOLDER", help="another MoE, such as examples/demo/cache/base")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def prepare(args: argparse.Namespace, folder: Path) -> Setting:
    """Makes model and documents under `folder`."""
    lengths = long_tailed_lengths(STEP_DOCUMENTS, seed=0)
    parity_lengths = [n // 4 + 8 for n in long_tailed_lengths(STEP_DOCUMENTS, seed=1)]
    model = Path(args.model) if args.model else folder / "tiny-qwen3-moe"
    if args.model and not (model / "config.json").exists():
        sys.exit(f"--model {model}: no config.json there; `make demo` makes examples/demo/cache/base")
    if not args.model:
        make_tiny_moe(model)
    for name, wanted in (("speed", lengths), ("parity", parity_lengths)):
        if args.model:
            texts = natural_documents(wanted, model=model, seed=1)
        else:
            texts = word_documents(wanted, vocabulary=words(), end=END, seed=1)
        for copies in {c.copies for c in CONTESTANTS.values()}:
            write_texts(folder / f"{name}-{copies}.jsonl", texts * copies)
    return Setting(
        model=model, dtype=args.dtype, threads=args.threads, folder=folder, lengths=lengths,
        parity_lengths=parity_lengths,
    )  # fmt: skip


def compete(name: str, setting: Setting, *, steps: int, data: str = "speed", **changes: Any) -> dict[str, Any]:
    """Runs one contestant in a child process and returns what it measured. Raises when the child fails."""
    contestant = CONTESTANTS[name]
    lengths = setting.lengths if data == "speed" else setting.parity_lengths
    packs = -(-sum(lengths) // MAX_TOKENS)
    settings = dict(contestant.settings)
    if contestant.script == "contestant_trl.py":
        per_step = packs if contestant.packs else STEP_DOCUMENTS // contestant.batch
        settings |= {"per_device_train_batch_size": contestant.batch, "gradient_accumulation_steps": per_step}
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        job = {
            "model": str(setting.model), "dtype": setting.dtype, "threads": setting.threads, "folder": folder,
            "data": str(setting.folder / f"{data}-{contestant.copies}.jsonl"), "max_tokens": MAX_TOKENS,
            "tokens_per_step": packs * MAX_TOKENS, "rank": RANK, "alpha": ALPHA, "lr": LR, "seed": 0, "adapter": None,
            "steps": contestant.copies if contestant.copies > 1 else steps,
            "settings": settings, "model_settings": contestant.model_settings,
        } | changes  # fmt: skip
        child = subprocess.run(
            [sys.executable, str(HERE / contestant.script), json.dumps(job)],
            capture_output=True, text=True, env=os.environ | child_environment(setting.threads), check=False,
        )  # fmt: skip
    for line in child.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT ")) | {"dtype": setting.dtype}
    sys.exit(f"{name} failed:\n{child.stdout[-1000:]}\n{child.stderr[-3000:]}")


def child_environment(threads: int) -> dict[str, str]:
    """Threads that wait without spinning: on a shared machine spinning measures the neighbours."""
    return {
        "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def compare_losses(setting: Setting, *, steps: int) -> dict[str, Any]:
    """Loss curves from one and the same adapter on one and the same documents a step, and those of another seed.

    Every step takes all documents, so that no order of documents or packs can differ.
    """
    starts = {seed: setting.folder / f"adapter-{seed}" for seed in (0, 1)}
    for seed, folder in starts.items():
        first_adapter(setting.model, folder, dtype=setting.dtype, rank=RANK, alpha=ALPHA, seed=seed)
    ours = compete(OURS, setting, steps=steps, data="parity")
    theirs = compete("TRL batch 1", setting, steps=steps, data="parity", adapter=str(starts[0]))
    other = compete("TRL batch 1", setting, steps=steps, data="parity", adapter=str(starts[1]))
    return {
        "steps": steps, "gatewright": ours["losses"], "trl": theirs["losses"], "trl_other_seed": other["losses"],
        "difference": mean_difference(ours["losses"], theirs["losses"]),
        "noise": mean_difference(theirs["losses"], other["losses"]),
    }  # fmt: skip


def mean_difference(one: list[float], other: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def machine_rates(setting: Setting) -> Iterator[float]:
    """FLOP/s of torch's matmul in the run's type and threads, for a dense layer and for one expert's share of rows."""
    torch.set_num_threads(setting.threads)
    for rows, inner, columns in ((4096, 256, 512), (512, 256, 384), (2048, 2048, 2048)):
        yield matmul_rate(rows, inner, columns, dtype=getattr(torch, setting.dtype), repeats=8)


def best_of(measured: dict[str, Measured]) -> str:
    """The fastest of TRL's settings that keeps documents apart."""
    correct = [name for name, m in measured.items() if name not in (OURS, DEFAULT) and m.tokens_per_s and m.isolates]
    return max(correct, key=lambda name: measured[name].cpu_speed)


def summarise(setting: Setting, measured: dict[str, Measured], rate: float, parity: dict[str, Any]) -> dict[str, Any]:
    ours, best = measured[OURS], best_of(measured)
    work: Work = useful_flops(setting.model, setting.lengths, rank=RANK)
    tokens = sum(setting.lengths)
    ratios = {
        name: {
            "tokens_per_s": ours.speed / peer.speed,
            "tokens_per_cpu_s": ours.cpu_speed / peer.cpu_speed,
            "peak_memory": max(ours.peak_bytes) / max(peer.peak_bytes),
            "step_memory": max(ours.step_bytes) / max(peer.step_bytes),
        }
        for name, peer in measured.items()
        if name != OURS
    }
    return {
        "versions": versions(),
        "setting": {"model": str(setting.model), "dtype": setting.dtype, "threads": setting.threads},
        "lengths": setting.lengths,
        "best": best,
        "ratios": ratios,
        "contestants": {name: asdict(m) for name, m in measured.items()},
        "parity": parity,
        "machine_flops": rate,
        "useful_flops_per_token": work.total / tokens,
        "attention_share_of_flops": work.attention / work.total,
        "share_of_machine": ours.speed * work.total / tokens / rate,
        "share_of_machine_best": measured[best].speed * work.total / tokens / rate,
    }


def packed_lines(measured: dict[str, Measured], report: dict[str, Any]) -> list[str]:
    """Packed against padded, and against TRL's best packed setting, with what is wanted of each."""
    apart = [name for name in PACKED if measured[name].isolates]
    best = max(apart, key=lambda name: measured[name].cpu_speed)
    rows = (
        ("padded", f"faster than {PADDED}", PADDED, "tokens_per_cpu_s", "at least"),
        ("default", f"faster than {DEFAULT}", DEFAULT, "tokens_per_cpu_s", "at least"),
        ("packed", f"faster than {best}, packed, documents kept apart", best, "tokens_per_cpu_s", "at least"),
        ("memory", f"of the peak of {PADDED}", PADDED, "peak_memory", "at most"),
        ("memory", f"of the same above the loaded model, {PADDED}", PADDED, "step_memory", "at most"),
        ("memory", f"of the peak of {DEFAULT}, which recomputes", DEFAULT, "peak_memory", "at most"),
        ("memory", f"of the same above the loaded model, {DEFAULT}", DEFAULT, "step_memory", "at most"),
    )  # fmt: skip
    return ["", *(
        f"{report['ratios'][peer][key]:.2f} times {what} (wanted: {bound} {TARGETS[target]})"
        for target, what, peer, key, bound in rows
    )]  # fmt: skip


def header(setting: Setting) -> list[str]:
    load = os.getloadavg()[0]
    lines = [
        ", ".join(f"{name} {number}" for name, number in versions().items()),
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {setting.threads} threads, "
        f"{setting.dtype}, model {setting.model.name}",
        f"{len(setting.lengths)} documents a step, {sum(setting.lengths):,} tokens, "
        f"median {statistics.median(setting.lengths):.0f}, longest {max(setting.lengths):,}",
    ]
    if load > 0.5:
        lines.append(f"warning: the load average is {load:.1f}; read tokens per CPU second, not tokens per second")
    return lines


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("gatewright", "torch", "transformers", "peft", "trl", "accelerate")}


COLUMNS = {
    "tokens/s": "tokens_per_s",
    "tokens/CPU s": "tokens_per_cpu_s",
    "peak GiB": "peak_memory",
    "step GiB": "step_memory",
}


def table(measured: dict[str, Measured], report: dict[str, Any]) -> list[str]:
    """The report for people. Behind each number: ours divided by it."""
    lines = ["", f"{'':<32}" + "".join(f"{title:>13} {'ours ×':>7}" for title in COLUMNS)]
    for name, m in measured.items():
        peak, step = max(m.peak_bytes) / GIB, max(m.step_bytes) / GIB
        values = [f"{m.speed:,.0f}", f"{m.cpu_speed:,.0f}", f"{peak:.2f}", f"{step:.2f}"]
        ratios = report["ratios"].get(name)
        shown = [f"{ratios[key]:.2f}" if ratios else "" for key in COLUMNS.values()]
        cells = "".join(f"{value:>13} {ratio:>7}" for value, ratio in zip(values, shown, strict=True))
        lines.append(f"{name:<32}{cells}" + ("" if m.isolates else f"   leaks ({m.leak:.2g})"))
    total = sum(measured[OURS].phases_s.values())
    phases = ", ".join(f"{phase} {seconds / total:.1%}" for phase, seconds in measured[OURS].phases_s.items())
    parity = report["parity"]
    return [
        *lines,
        "",
        f"best correct TRL setting: {report['best']}",
        f"our time: {phases}",
        f"useful work: {report['useful_flops_per_token'] / 1e6:.0f} MFLOP a token, "
        f"{report['attention_share_of_flops']:.0%} of it attention",
        f"machine: {report['machine_flops'] / 1e9:.0f} GFLOP/s in torch's matmul; reached by ours "
        f"{report['share_of_machine']:.0%}, by TRL's best {report['share_of_machine_best']:.0%}",
        f"loss over {parity['steps']} steps from the same adapter, {parity['trl'][0]:.4f} to {parity['trl'][-1]:.4f}: "
        f"mean |ours - TRL| {parity['difference']:.1e}; TRL from another adapter {parity['noise']:.1e}",
    ]


if __name__ == "__main__":
    main()
