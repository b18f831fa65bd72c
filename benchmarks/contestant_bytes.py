"""One rank of a run that makes a step, and says what it holds then beside what the planner says: for ranks.py."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gatewright.parallel.layout import layout_of
from gatewright.parallel.place import find_place
from gatewright.parallel.ranks import join_ranks
from gatewright.planner import plan_run
from gatewright.planner.memory_states import shares, states
from gatewright.planner.policy import find_policy
from gatewright.spec.run import Run
from gatewright.train.setup import Trainer, set_up
from gatewright.train.step import train_step


def main(job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)
    place = find_place()
    run = Run.model_validate(run_file(job, ranks=place.size))
    layout = layout_of(run.parallel, ranks=place.size)
    with join_ranks(place, layout, device=torch.device("cpu"), timeout_s=60) as ranks:
        trainer = set_up(run, log=lambda event: None, ranks=ranks)
        train_step(
            trainer.model, trainer.head, trainer.optimizer, trainer.gradients, trainer.loader.step(0), lr=1e-4,
            clip_norm=1.0, loss_chunk_tokens=256,
        )  # fmt: skip
        return {"measured": float(held_bytes(trainer)), "planned": planned_bytes(run, place.size)}


def run_file(job: dict[str, Any], *, ranks: int) -> dict[str, Any]:
    return {
        "run": f"bytes-{job['ep']}",
        "runs_dir": str(Path(job["folder"]) / "runs"),
        "model": {"path": job["model"], "dtype": "bfloat16"},
        "method": {"adapter": {"rank": 16, "targets": ["attention", "experts"]}},
        "data": {"train": job["data"]},
        "train": {"tokens_per_step": 4096, "micro_batch_tokens": 1024, "steps": 1, "lr": 1e-4, "threads": 1},
        "parallel": {"ep": job["ep"]},
        "hardware": {"gpu": "h200", "per_node": ranks},
    }


def held_bytes(trainer: Trainer) -> int:
    """Weights, gradients and optimizer state of this rank."""
    owned = trainer.gradients.owned.values()
    moments = [value for p in owned for value in trainer.optimizer.state[p].values() if value.dim()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    return sum(t.nbytes for t in [*local, *(p.grad for p in owned if p.grad is not None), *moments])


def planned_bytes(run: Run, ranks: int) -> float:
    policy = find_policy("gatewright")
    job = replace(plan_run.ask_run(run, gpus=ranks).job, layout=plan_run.layout_of(run, ranks))
    found = states(job, policy, shares(job, policy, 0))
    return found.trained_weights + found.adapters + found.frozen_weights + found.grads + found.optimizer


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(json.loads(sys.argv[1]))))
