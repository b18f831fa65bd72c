"""Rehearsed peaks beside published ones: runs of the Hugging Face Trainer whose exact bytes are known.

    python benchmarks/rehearsal_accuracy.py

The rows are those of data/measured_memory.csv that plain transformers and PEFT can repeat: exact bytes of
max_memory_allocated, no fused kernels of another package; one GPU, and two with FSDP. Those with FSDP ran FSDP1, the
rehearsal runs FSDP2, which our trainer uses. No GPU and no weights are needed; five minutes on one core.
"""

import csv
import json
from pathlib import Path

import torch

from gatewright.probe.rehearsal import config_of
from gatewright.probe.rehearsal_plain import PlainStep, rehearse_plain
from gatewright.spec.rehearsal import Rehearsal

ROWS = Path(__file__).parent / "data" / "measured_memory.csv"
CATALOGUE = Path(__file__).parents[1] / "gatewright" / "catalog" / "models"
GIB = 2**30
CUBLAS_BYTES = 2 * 8_519_680
"""cuBLAS workspace on an A100, in the main and in the autograd thread (CUBLAS_WORKSPACE_CONFIG in torch's notes)."""
OLDER = "refs/a100_80gb.csv"
"""These runs are by transformers up to 4.44, which raised and shifted the logits by copies."""


def comparable(row: dict[str, str]) -> bool:
    return (
        row["framework"] == "fms-hf-tuning / none"
        and row["world_size"] in ("1", "2")
        and row["method"] in ("full", "lora")
        and row["metric"].startswith("max_memory_allocated")
        and (CATALOGUE / f"{row['model']}.json").exists()
    )


def rehearsed(row: dict[str, str]) -> Rehearsal:
    config = json.loads((CATALOGUE / f"{row['model']}.json").read_text(encoding="utf-8"))["config"]
    older = row["source"].endswith(OLDER)
    step = PlainStep(
        rows=int(row["micro_batch"]),
        tokens_per_row=int(row["seq_len"]),
        lora_rank=round(float(row["lora_r"])) if row["method"] == "lora" else None,
        target_modules=tuple(row["target_modules"].split()),
        checkpointing=row["grad_ckpt"].startswith("full"),
        loss="upcast_and_shift" if older else "transformers",
        ranks=int(row["world_size"]),
    )
    return rehearse_plain(config_of(config), step, model=row["model"])


def main() -> None:
    torch.set_num_threads(1)
    with ROWS.open(encoding="utf-8", newline="") as file:
        rows = sorted((row for row in csv.DictReader(file) if comparable(row)), key=lambda row: int(row["world_size"]))
    print(f"{'model':<16}{'method':<7}{'GPUs':>5}{'tokens':>7}{'measured':>10}{'rehearsed':>11}{'error':>8}  at")
    errors: dict[str, list[float]] = {}
    for row in rows:
        done = rehearsed(row)
        measured, got = float(row["peak_gib"]), (done.peak.bytes + CUBLAS_BYTES) / GIB
        error = got / measured - 1
        errors.setdefault("one GPU" if row["world_size"] == "1" else f"FSDP, {row['method']}", []).append(error)
        print(
            f"{row['model']:<16}{row['method']:<7}{row['world_size']:>5}{done.tokens:>7}{measured:>10.3f}{got:>11.3f}"
            f"{error:>+8.2%}  {done.peak.phase} ({done.seconds:.0f} s)",
            flush=True,
        )
    for group, found in errors.items():
        print(f"{group}: {len(found)} rows, GiB; largest error {max(map(abs, found)):.2%}")


if __name__ == "__main__":
    main()
