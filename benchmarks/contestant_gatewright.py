"""One Gatewright run in this process: takes a job as JSON on its command line, trains, prints what it measured."""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from gatewright.cli_quiet import quiet_libraries

quiet_libraries()  # as the command line does, before torch is imported

from measure import forget_peak, peak_resident_bytes, resident_bytes  # noqa: E402
from rich.console import Console  # noqa: E402

from gatewright.parallel.place import find_place  # noqa: E402
from gatewright.spec.read import read_run  # noqa: E402
from gatewright.train.loop import train  # noqa: E402

PHASES = ("data", "forward", "backward", "optimizer")


class StepClock(Console):
    """The console of the run: instead of showing a line it notes when the line came."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded_bytes = 0
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []

    def print(self, *objects: Any, **_: Any) -> None:
        line = str(objects[0])
        if line.startswith("model "):
            forget_peak()
            self.loaded_bytes = resident_bytes()
        if line.startswith(("model ", "step ")):
            self.ends.append(time.perf_counter())
            self.cpu_ends.append(time.process_time())


def main(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    file = folder / "run.yaml"
    file.write_text(json.dumps(run_file(job)))  # JSON is YAML
    clock = StepClock()
    code = train(read_run(file), console=clock)
    assert code == 0, f"exit code {code}"
    events = [json.loads(line) for line in (folder / "runs" / "bench" / "events.jsonl").open(encoding="utf-8")]
    steps = [event for event in events if event["kind"] == "step"]
    model = next(event for event in events if event["kind"] == "model")
    data = next(event for event in events if event["kind"] == "data")
    return {
        "rank": find_place().rank,
        "step_s": between(clock.ends),
        "step_cpu_s": between(clock.cpu_ends),
        "tokens": [step["tokens"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "loaded_bytes": clock.loaded_bytes,
        "peak_bytes": peak_resident_bytes(),
        "trainable": model["trainable_parameters"],
        "experts": model["experts_kernel"],
        "attention": model["attention"],
        "fill": data["fill"],
        "phases_s": [{part: step[f"{part}_s"] for part in PHASES} for step in steps],
    }


def run_file(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": "bench",
        "runs_dir": str(Path(job["folder"]) / "runs"),
        "model": {"path": job["model"], "dtype": job["dtype"]},
        "method": {"adapter": {"rank": job["rank"], "alpha": job["alpha"], "targets": ["attention", "experts"]}},
        "data": {"train": job["data"]},
        "train": {
            "tokens_per_step": job["tokens_per_step"], "micro_batch_tokens": job["max_tokens"], "steps": job["steps"],
            "lr": job["lr"], "schedule": "constant", "threads": job["threads"], "seed": job["seed"],
            "save_every_steps": 1_000_000,
        } | {key: value for key, value in job["settings"].items() if key != "parallel"},
        "parallel": job["settings"].get("parallel", "auto"),
    }  # fmt: skip


def between(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    print("RESULT " + json.dumps(result))
