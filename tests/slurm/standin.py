"""A stand-in for a trainer, without torch: steps of a chained hash, checkpoints, events, and a hearing for its end.

standin.py FOLDER --steps N --step-s S --save-every K [--oom-at STEP] [--fail-at STEP] [--gate]
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

STOPPED, HOPELESS = 85, 3


class Ears:
    """Hears signals, the stop file and the clock."""

    def __init__(self) -> None:
        self.signal = ""
        self.stop_file = Path(os.environ.get("GATEWRIGHT_STOP_FILE", "/nonexistent"))
        self.end = float(os.environ.get("GATEWRIGHT_END_TIME", "inf"))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: object) -> None:
        self.signal = signal.Signals(number).name

    def reason(self, *, lead_s: float) -> str:
        if self.signal:
            return self.signal
        if self.stop_file.exists():
            return "stop file"
        return "deadline" if time.time() > self.end - lead_s else ""


def log(folder: Path, kind: str, **fields: object) -> None:
    line = {"v": 1, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def load(folder: Path) -> tuple[int, str]:
    for path in sorted(folder.glob("checkpoints/step-*/manifest.json"), reverse=True):
        state = json.loads((path.parent / "state.json").read_text())
        return state["step"], state["value"]
    return 0, ""


def save(folder: Path, step: int, value: str) -> None:
    final = folder / "checkpoints" / f"step-{step:08d}"
    partial = final.with_name(f".partial-{final.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "state.json").write_text(json.dumps({"step": step, "value": value}))
    (partial / "manifest.json").write_text("{}")
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    log(folder, "save", step=step, path=str(final), bytes=100, seconds=0.01, best=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    parser.add_argument("--oom-at", type=int)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--say", default="")
    given = parser.parse_args()
    ears = Ears()
    given.folder.mkdir(parents=True, exist_ok=True)
    # A link whose node was given up may live for a moment beside its successor. A trainer takes seconds until it asks
    # for the lock; this one waits instead.
    lock = (given.folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    step, value = load(given.folder)
    log(given.folder, "start", run="standin", versions={}, device="cpu", threads=1,
        resumed_step=step or None, steps=given.steps)  # fmt: skip
    while step < given.steps:
        if reason := ears.reason(lead_s=3 * given.step_s + 0.2):
            save(given.folder, step, value)
            log(given.folder, "stop", step=step, reason="saved", detail=reason)
            sys.exit(STOPPED)
        time.sleep(given.step_s)
        step += 1
        value = hashlib.sha256(f"{value} {step}".encode()).hexdigest()
        log(given.folder, "step", step=step, loss=1 / step, lr=1e-3, step_s=given.step_s, tokens=1)
        if given.oom_at == step and not (given.folder / "oom").exists():
            (given.folder / "oom").touch()
            held = bytearray(2**30)
            print(len(held), flush=True)
        if given.fail_at == step:
            print(given.say, flush=True)
            sys.exit(1)
        if step % given.save_every == 0:
            save(given.folder, step, value)
    save(given.folder, step, value)
    (given.folder / "result.txt").write_text(value)
    log(given.folder, "stop", step=step, reason="finished", detail="")


if __name__ == "__main__":
    main()
