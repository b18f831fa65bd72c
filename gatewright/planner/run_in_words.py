"""The run that a question in words would be, for a rehearsal of the trainer's own step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatewright.planner.ask import (
    DEFAULT_RANK,
    DEFAULT_TARGETS,
    known_choice,
    layout_from,
    within_limits,
)
from gatewright.planner.catalogue import find_model
from gatewright.planner.targets import WILD
from gatewright.spec.auto import AUTO_MICRO_BATCH_TOKENS
from gatewright.spec.errors import UserError
from gatewright.spec.run import Run
from gatewright.spec.shape import TARGET_ROLES

TAKEN = (
    "gpu",
    "per_node",
    "parallel",
    "method",
    "rank",
    "targets",
    "tokens",
    "document_tokens",
    "tokens_per_step",
    "checkpointing",
)
"""Options that a rehearsal follows; the kind of GPU decides nothing."""
DENSE = {"none": "replicate", "zero2": "zero2", "fsdp2": "zero3"}
"""Names of the planner's layouts, and the run file's."""
CHECKPOINTING = {"none": "none", "alternate": "selective", "full": "full"}


def run_in_words(
    model: str, given: Mapping[str, Any], *, gpus: int | None = None
) -> tuple[Run, Mapping[str, Any] | None]:
    """A run that trains as the options say, and the catalogue's config where the model is no folder."""
    for name in given:
        if name not in TAKEN:
            raise UserError(f"--{name.replace('_', '-')} does not go with --simulate; leave one out.")
    tokens = given.get("tokens", AUTO_MICRO_BATCH_TOKENS)
    within_limits(tokens=tokens, rank=given.get("rank"), document_tokens=given.get("document_tokens"))
    method = given.get("method", "lora")
    known_choice("method", method, ("lora", "qlora", "full"))
    checkpointing = given.get("checkpointing", "full")
    known_choice("checkpointing", checkpointing, tuple(CHECKPOINTING))
    path = Path(model)
    folder = path.parent if path.is_file() else path
    config = None if folder.is_dir() and path.exists() else find_model(model).config
    targets = [item.strip() for item in given.get("targets", "").split(",") if item.strip()] or list(DEFAULT_TARGETS)
    for target in targets:
        if not WILD.intersection(target):
            known_choice("targets", target, tuple(TARGET_ROLES))
    adapter = {"rank": given.get("rank", DEFAULT_RANK), "targets": targets}
    run = Run.model_validate(
        {
            "run": "rehearsal",
            "model": {"path": str(folder) if config is None else model},
            "method": {"full": {}, "lora": {"adapter": adapter}, "qlora": {"adapter": adapter, "quantize": "nf4"}}[
                method
            ],
            "data": {"train": "rehearsal", "max_tokens": given.get("document_tokens", tokens)},
            "train": {
                "tokens_per_step": given.get("tokens_per_step", 2 * tokens * (gpus or 1)),
                "micro_batch_tokens": tokens,
                "steps": 1,
                "lr": 1e-4,
                "checkpointing": CHECKPOINTING[checkpointing],
            },
            **_machine(given, gpus),
        }
    )
    return run, config


def _machine(given: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """The run file's hardware and parallel. Raises UserError for a layout that our trainer does not have."""
    within_limits(gpus=gpus)
    if gpus is None:
        if "parallel" in given:
            raise UserError("--parallel divides a known number of GPUs; give --gpus too.")
        return {}
    # How many of them share a node changes no byte.
    machine: dict[str, Any] = {"hardware": {"gpu": given.get("gpu", "h200"), "per_node": gpus, "nodes": 1}}
    if "parallel" in given:
        layout = layout_from(given["parallel"], ranks=gpus, backend="gatewright")
        if layout.sharding not in DENSE or max(layout.cp, layout.tp, layout.pp) > 1:
            raise UserError(f"--parallel {given['parallel']} does not go with --simulate; give ep, dense or both.")
        machine["parallel"] = {
            "ep": layout.ep,
            "dense": DENSE[layout.sharding],
            "dp_replicate": gpus // (layout.shard_ranks or gpus),
        }
    return machine
