"""A few training steps on one rank, with everything that must not depend on how many ranks there are."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from gatewright.model.quantized import held_bytes
from gatewright.parallel.layout import layout_of
from gatewright.parallel.pieces import Piece
from gatewright.parallel.place import ALONE, Place
from gatewright.parallel.ranks import join_ranks
from gatewright.spec.run import Run
from gatewright.train.context import on_device
from gatewright.train.optim import learning_rate
from gatewright.train.setup import set_up
from gatewright.train.step import train_step

CPU = torch.device("cpu")


@dataclass
class Taken:
    """What one rank saw of some steps."""

    numbers: list[dict[str, Any]]
    """loss, grad_norm, tokens, target_tokens, expert_tokens, dropped, balance_loss, z_loss of each step."""
    gradients: dict[str, tuple[Piece, Tensor]]
    """Of the first step, after clipping."""
    weights: dict[str, tuple[Piece, Tensor]]
    """After the last step: what this rank updated."""
    held: dict[str, Tensor]
    """After the last step: trained weights as the model holds them."""
    bytes: dict[str, int]
    """weights, gradients and optimizer state of what trains, and the frozen weights, on this rank."""


def take_steps(place: Place, run: Run, *, steps: int = 3, threads: int = 1) -> Taken:
    """The run's first steps on this rank."""
    torch.set_num_threads(threads)
    with join_ranks(place, layout_of(run.parallel, ranks=place.size), device=CPU, timeout_s=60) as ranks:
        trainer = set_up(run, log=lambda event: None, ranks=ranks)
        numbers, gradients = [], {}
        for step in range(steps):
            result = train_step(
                trainer.model, trainer.head, trainer.optimizer, trainer.gradients,
                [on_device(batch, ranks) for batch in trainer.loader.step(step)],
                lr=learning_rate(step, steps=steps, train=run.train), clip_norm=run.train.clip_norm,
                loss_chunk_tokens=run.train.loss_chunk_tokens, router=trainer.router.loss if trainer.router else None,
            )  # fmt: skip
            shown = ("loss", "grad_norm", "tokens", "target_tokens", "balance_loss", "z_loss")
            number = {name: getattr(result, name) for name in shown}
            for name, counts in (("expert_tokens", result.expert_tokens), ("dropped", result.dropped)):
                number[name] = None if counts is None else counts.tolist()
            numbers.append(number)
            if step == 0:
                gradients = {
                    name: (trainer.gradients.shares[name].piece, owned.grad.clone())
                    for name, owned in trainer.gradients.owned.items()
                    if owned.grad is not None
                }
        shares = trainer.gradients.shares.values()
        return Taken(
            numbers=numbers,
            gradients=gradients,
            weights={share.name: (share.piece, share.owned.detach().clone()) for share in shares},
            held={share.name: _local(share.weight).detach().clone() for share in shares},
            bytes=_bytes(trainer),
        )


def alone(run: Run, *, steps: int = 3) -> Taken:
    """The same in one process."""
    return take_steps(ALONE, run.model_copy(update={"parallel": "auto"}), steps=steps)


def put_together(parts: list[dict[str, tuple[Piece, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from the pieces of all ranks; pieces that several ranks hold must be equal to the bit."""
    whole: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    for part in parts:
        for name, (piece, tensor) in part.items():
            flat = whole.setdefault(name, torch.zeros(prod(piece.shape)))
            seen = known.setdefault(name, torch.zeros(prod(piece.shape), dtype=torch.bool))
            index = torch.cat([torch.arange(0), *(torch.arange(begin, end) for begin, end in piece.part.runs)])
            again = seen[index]
            assert torch.equal(flat[index][again], tensor.reshape(-1)[again]), f"{name} differs between ranks"
            flat[index], seen[index] = tensor.reshape(-1), True
    for name, seen in known.items():
        assert seen.all(), f"{name}: no rank has {int((~seen).sum())} of its elements"
    return whole


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, torch.distributed.tensor.DTensor) else weight


def _bytes(trainer: Any) -> dict[str, int]:
    owned = trainer.gradients.owned
    states = {id(v): v for p in owned.values() for v in trainer.optimizer.state[p].values() if isinstance(v, Tensor)}
    trained = {id(share.weight) for share in trainer.gradients.shares.values()}
    held = list(trainer.model.parameters())
    return {
        "weights": sum(held_bytes(p) for p in held if id(p) in trained),
        "frozen": sum(held_bytes(p) for p in held if id(p) not in trained),
        "gradients": sum(p.grad.nbytes for p in owned.values() if p.grad is not None),
        "optimizer": sum(state.nbytes for state in states.values() if state.dim()),
    }
