"""The stall of a save: how long the steps of a full fine-tuning wait for one that is written in the background, and for
one that they stop for, on one process and on two.

Ordinary runs of `gatewright train [--nproc 2]` of a mixture of experts made on the spot; what is shown comes from their
events. The settings alternate so that a busy machine troubles both. The first save of a process also gets the memory
for its copy, and the last has no steps beside it: both are left out of the medians, the first is shown by itself.

    python benchmarks/save_stall.py [--ranks 1 2] [--rounds 1] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import make_tiny_moe, words

SETTINGS = {"background": True, "foreground": False}
SAVE_EVERY, SAVES = 8, 3
GOAL = 0.2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--json", type=Path)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="save-stall-") as folder:
        make_tiny_moe(Path(folder) / "model")
        write_documents(Path(folder) / "documents.jsonl")
        results = [measure(Path(folder), ranks=ranks, rounds=asked.rounds) for ranks in asked.ranks]
    for result in results:
        report(result)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(folder: Path, *, ranks: int, rounds: int) -> dict[str, Any]:
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for number in range(rounds):
        for name, background in SETTINGS.items():
            seen[name].append(train(folder, f"{name}-{ranks}-{number}", ranks=ranks, background=background))
    found: dict[str, Any] = {"ranks": ranks, "bytes": seen["background"][0]["bytes"]}
    for name, runs in seen.items():
        found[name] = {
            "first_stall_s": statistics.median(run["stalls_s"][0] for run in runs),
            "stall_s": statistics.median(stall for run in runs for stall in run["stalls_s"][1:]),
            "write_s": statistics.median(seconds for run in runs for seconds in run["saves_s"][1:]),
            "step_s": statistics.median(seconds for run in runs for seconds in run["alone_s"]),
            "step_beside_a_save_s": statistics.median(seconds for run in runs for seconds in run["beside_s"]),
        }
    return found | {"ratio": found["background"]["stall_s"] / found["foreground"]["stall_s"]}


def train(folder: Path, name: str, *, ranks: int, background: bool) -> dict[str, Any]:
    """One run: its stalls and saves but the last, and the times of its steps, beside a save and alone."""
    content = {
        "run": name,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "method": {"adapter": None},
        "data": {"train": str(folder / "documents.jsonl")},
        "train": {
            "tokens_per_step": 256 * ranks, "micro_batch_tokens": 256, "steps": SAVE_EVERY * (SAVES + 1) - 1,
            "lr": 1e-4, "threads": 1, "save_every_steps": SAVE_EVERY, "keep_checkpoints": 1,
            "save_in_background": background,
        },
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    command = [sys.executable, "-m", "gatewright", "train", str(file), *(["--nproc", str(ranks)] if ranks > 1 else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    lines = (folder / "runs" / name / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    saves = [event for event in events if event["kind"] == "save"][:-1]
    steps = {event["step"]: event["step_s"] for event in events if event["kind"] == "step"}
    beside = beside_a_save(events)
    return {
        "bytes": saves[0]["bytes"],
        "stalls_s": [save["stall_s"] for save in saves],
        "saves_s": [save["seconds"] for save in saves],
        "alone_s": [seconds for step, seconds in steps.items() if step > 1 and step not in beside],
        "beside_s": [seconds for step, seconds in steps.items() if step in beside] or [0.0],
    }


def beside_a_save(events: list[dict[str, Any]]) -> set[int]:
    """Steps that ended between the beginning of a save and the word that it was complete."""
    found: set[int] = set()
    last = 0
    for event in events:
        if event["kind"] == "step":
            last = event["step"]
        elif event["kind"] == "save":
            found |= set(range(event["step"] + 1, last + 1))
    return found


def write_documents(file: Path) -> None:
    known = words()
    with file.open("w", encoding="utf-8") as out:
        for number in range(400):
            text = " ".join(known[(number * 7919 + i * i) % len(known)] for i in range(120))
            out.write(json.dumps({"text": text}) + "\n")


def report(result: dict[str, Any]) -> None:
    ranks, goal = result["ranks"], "met" if result["ratio"] <= GOAL else "MISSED"
    print(f"{ranks} process{'es' * (ranks > 1)}, checkpoints of {result['bytes'] / 1e6:,.0f} MB, seconds")
    print(f"{'':<12}{'stall':>8}{'first':>8}{'save':>8}{'step':>8}{'beside':>8}")
    for name in SETTINGS:
        row = result[name]
        values = (row[key] for key in ("stall_s", "first_stall_s", "write_s", "step_s", "step_beside_a_save_s"))
        print(f"{name:<12}" + "".join(f"{value:>8.3f}" for value in values))
    print(f"stall in the background over foreground: {result['ratio']:.3f} (goal {GOAL}: {goal})")


if __name__ == "__main__":
    main()
