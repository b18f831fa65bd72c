"""Many ranks for real: `gatewright train` on two processes of this machine beside TRL's `SFTTrainer` on two processes.

    python benchmarks/ranks.py [--ranks 2] [--rounds 1] [--json FILE]

Model, documents and layout are the same for both sides: everything replicated (DDP), and weights sharded (FSDP2), where
TRL can run it. Every run is a set of child processes started by torchrun, one thread a rank; sides take turns, round
after round, so that a busy machine troubles both. Shown are medians, and ours over theirs. Beside that: what a second
rank is worth to us, and what expert parallelism takes off a rank, in bytes, against the plan.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from documents import long_tailed_lengths, word_documents, write_texts
from models import END, make_tiny_moe, words

HERE = Path(__file__).parent
RANK, ALPHA, LR, LONGEST_TOKENS, STEP_DOCUMENTS, STEPS = 16, 32, 1e-3, 1024, 8, 4
MIB = 2.0**20
FSDP2 = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
FAST = {"gradient_checkpointing": False, "ddp_backend": "gloo"}


@dataclass(frozen=True, kw_only=True)
class Side:
    """A trainer with a layout."""

    script: str
    ranks: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Measured:
    """A side's numbers over all rounds; `refused`: why it did not run, in its own words."""

    tokens_per_s: list[float] = field(default_factory=list)
    tokens_per_cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    refused: str = ""

    @property
    def speed(self) -> float:
        return statistics.median(self.tokens_per_s)

    @property
    def cpu_speed(self) -> float:
        return statistics.median(self.tokens_per_cpu_s)


def sides(ranks: int) -> dict[str, Side]:
    """By name; each of TRL's is compared with ours of the same layout."""
    ours, trl = "contestant_gatewright.py", "contestant_trl.py"
    return {
        "ours, 1 rank": Side(script=ours, ranks=1),
        "ours, replicate": Side(script=ours, ranks=ranks),
        "TRL, DDP": Side(script=trl, ranks=ranks, settings=FAST),
        "ours, zero3": Side(script=ours, ranks=ranks, settings={"parallel": {"dense": "zero3"}}),
        "TRL, FSDP2": Side(script=trl, ranks=ranks, settings=FAST | FSDP2),
    }


PAIRS = {
    "TRL, DDP": "ours, replicate",
    "TRL, FSDP2": "ours, zero3",
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--json", type=Path, help="write every number there")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        folder = Path(temporary)
        make_tiny_moe(folder / "model")
        lengths = [min(length, LONGEST_TOKENS) for length in long_tailed_lengths(STEP_DOCUMENTS, seed=0)]
        write_texts(folder / "documents.jsonl", word_documents(lengths, vocabulary=words(), end=END, seed=1) * STEPS)
        print(f"{asked.ranks} ranks, {STEP_DOCUMENTS} documents of {sum(lengths):,} tokens a step, one thread a rank")
        measured = compete(folder, lengths, asked)
        held = {name: bytes_of(folder, name, asked.ranks) for name in ("replicate", "ep")}
    results = summarise(measured, held, asked.ranks)
    print("\n".join(table(measured, results, asked.ranks)))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def compete(folder: Path, lengths: list[int], asked: argparse.Namespace) -> dict[str, Measured]:
    every = sides(asked.ranks)
    measured = {name: Measured() for name in every}
    for round_number in range(asked.rounds):
        for name, side in every.items():
            found = measured[name]
            if found.refused:
                continue
            run_folder = folder / f"{name}-{round_number}"
            run_folder.mkdir()
            results, fault = launch(side, job_of(side, folder, run_folder, lengths))
            if fault:
                found.refused = fault
                continue
            # The first step of a run is left out. Rank 0 has the clock; all ranks do alike.
            first = results[0]
            tokens, seconds, cpu = (sum(first[key][1:]) for key in ("tokens", "step_s", "step_cpu_s"))
            found.tokens_per_s.append(tokens / seconds)
            found.tokens_per_cpu_s.append(tokens / (cpu * side.ranks))
            found.peak_bytes.append(first["peak_bytes"])
            print(f"  round {round_number + 1}: {name}: {found.tokens_per_s[-1]:,.0f} tokens/s", flush=True)
    return measured


def job_of(side: Side, folder: Path, run_folder: Path, lengths: list[int]) -> dict[str, Any]:
    """What the child is told. TRL takes one document a micro-batch, which pads nothing and is its fastest on a CPU."""
    settings = dict(side.settings)
    if side.script == "contestant_trl.py":
        settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": STEP_DOCUMENTS // side.ranks}
    packs = -(-sum(lengths) // LONGEST_TOKENS)
    return {
        "model": str(folder / "model"), "dtype": "float32", "threads": 1, "folder": str(run_folder), "adapter": None,
        "data": str(folder / "documents.jsonl"), "max_tokens": LONGEST_TOKENS,
        "tokens_per_step": packs * LONGEST_TOKENS,
        "rank": RANK, "alpha": ALPHA, "lr": LR, "seed": 0, "steps": STEPS, "settings": settings, "model_settings": {},
    }  # fmt: skip


def launch(side: Side, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """What each rank measured, by rank; or the last line of what went wrong."""
    done = torchrun([str(HERE / side.script), json.dumps(job)], ranks=side.ranks)
    results = found_in(done.stdout)
    if done.returncode or len(results) != side.ranks:
        return [], last_error(done.stderr)
    return sorted(results, key=lambda result: result["rank"]), ""


def torchrun(command: list[str], *, ranks: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([*launcher, *command], capture_output=True, text=True, env=environment, check=False)


def found_in(text: str) -> list[dict[str, Any]]:
    """What ranks printed behind RESULT; the lines of two may have run into one."""
    return [json.JSONDecoder().raw_decode(part)[0] for part in text.split("RESULT ")[1:]]


def last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line and "ChildFailed" not in line]
    return lines[0][-200:] if lines else "ended without a result"


def bytes_of(folder: Path, name: str, ranks: int) -> dict[str, float]:
    """Bytes a rank holds of weights, gradients and optimizer state after a step, and those of the plan."""
    job = {"model": str(folder / "model"), "data": str(folder / "documents.jsonl"), "ep": ranks if name == "ep" else 1}
    done = torchrun([str(HERE / "contestant_bytes.py"), json.dumps(job | {"folder": str(folder)})], ranks=ranks)
    found = found_in(done.stdout)
    if len(found) != ranks:
        sys.exit(f"bytes of {name} failed: {last_error(done.stderr)}")
    return {what: max(rank[what] for rank in found) for what in found[0]}


def summarise(measured: dict[str, Measured], held: dict[str, dict[str, float]], ranks: int) -> dict[str, Any]:
    ratios = {
        theirs: {
            "tokens_per_s": measured[ours].speed / measured[theirs].speed,
            "tokens_per_cpu_s": measured[ours].cpu_speed / measured[theirs].cpu_speed,
            "peak_memory": max(measured[ours].peak_bytes) / max(measured[theirs].peak_bytes),
        }
        for theirs, ours in PAIRS.items()
        if not measured[theirs].refused
    }
    alone, many = measured["ours, 1 rank"], measured["ours, replicate"]
    share = {what: held["ep"][what] / held["replicate"][what] for what in ("measured", "planned")}
    return {
        "ratios": ratios,
        "refused": {name: found.refused for name, found in measured.items() if found.refused},
        "scaling": many.speed / (ranks * alone.speed),
        "scaling_by_cpu": many.cpu_speed / alone.cpu_speed,
        "bytes": held,
        "ep_share": share,
        "ep_share_off_plan": share["measured"] / share["planned"] - 1,
        "sides": {name: vars(found) for name, found in measured.items()},
    }


def table(measured: dict[str, Measured], results: dict[str, Any], ranks: int) -> Iterator[str]:
    """For people. Behind a number of TRL's: ours of the same layout divided by it."""
    yield f"\n{'':<22}{'tokens/s':>10}{'ours ×':>8}{'tokens/CPU s':>14}{'ours ×':>8}{'peak MiB':>10}{'ours ×':>8}"
    for name, found in measured.items():
        if found.refused:
            yield f"{name:<22}did not run: {found.refused}"
            continue
        ratio = results["ratios"].get(name, {})
        shown = [f"{ratio[key]:.2f}" if ratio else "" for key in ("tokens_per_s", "tokens_per_cpu_s", "peak_memory")]
        peak = max(found.peak_bytes) / MIB
        yield (
            f"{name:<22}{found.speed:>10,.0f}{shown[0]:>8}{found.cpu_speed:>14,.0f}{shown[1]:>8}{peak:>10,.0f}{shown[2]:>8}"
        )
    yield (
        f"\nscaling from 1 to {ranks} ranks: {results['scaling']:.0%} by the clock, {results['scaling_by_cpu']:.0%} by "
        "processor time"
    )
    share = results["ep_share"]
    yield (
        f"bytes of a rank with ep {ranks} over replicated experts: {share['measured']:.3f}, planned "
        f"{share['planned']:.3f} ({results['ep_share_off_plan']:+.1%})"
    )


if __name__ == "__main__":
    main()
