"""Where ranks meet: a store of keys and values, for who is there, and for what is said outside of collectives."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gatewright.parallel.place import Place
from gatewright.spec.errors import RankLost

LOOK_EVERY_S = 0.05
ROOT = "gatewright"
HERE = "here"
"""Topic: who has come."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """This rank at the store. Any thread may use it: nothing here waits inside the store, or is a collective."""

    place: Place
    store: dist.Store

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Returns when every rank has come. Raises RankLost, with their numbers, where some have not."""
        self.leave(HERE, None)
        if self._count(HERE, patience_s=timeout_s) < self.place.size:
            missing = [rank for rank in range(self.place.size) if not self.store.check([self._key(HERE, rank)])]
            raise RankLost(
                f"rank {', '.join(map(str, missing))} of {self.place.size} had not come after {timeout_s:.0f} s "
                "(parallel.timeout_s): look into its log, and whether it was started"
            )

    def leave(self, topic: str, value: Any) -> None:
        """Leaves what JSON can hold, once a topic, for the first rank to find."""
        self.store.set(self._key(topic, self.place.rank), json.dumps(value))
        self.count_in(topic)

    def left(self, topic: str) -> list[Any] | None:
        """What every rank left, by rank; None while one has not yet. It is gone afterwards."""
        if not self.all_in(topic):
            return None
        keys = [self._key(topic, rank) for rank in range(self.place.size)]
        values = [json.loads(self.store.get(key)) for key in keys]
        for key in [*keys, f"{ROOT}/{topic}/count"]:
            self.store.delete_key(key)
        return values

    def count_in(self, topic: str) -> None:
        """Counts this rank among those that a topic has reached."""
        self.store.add(f"{ROOT}/{topic}/count", 1)

    def all_in(self, topic: str) -> bool:
        """Whether every rank is counted in."""
        return bool(self.store.add(f"{ROOT}/{topic}/count", 0) >= self.place.size)

    def outlast(self, topic: str, *, patience_s: float) -> None:
        """Waits until every rank is counted in; the store may live in the process that does."""
        self._count(topic, patience_s=patience_s)

    def first_word(self, topic: str, value: Any) -> Any:
        """Says this where no rank has said anything yet; returns what was said first."""
        return json.loads(self.store.compare_set(f"{ROOT}/{topic}", "", json.dumps(value)))

    def said(self, topic: str) -> Any:
        """The first word; None before it."""
        return json.loads(self.store.get(f"{ROOT}/{topic}")) if self.store.check([f"{ROOT}/{topic}"]) else None

    def mark(self, step: int) -> None:
        """Leaves word of the step this rank is in, for those who find it missing."""
        self.store.set(self._key("at", self.place.rank), str(step))

    def marks(self) -> dict[int, int]:
        """The step each rank was last heard of in; empty where the store is gone."""
        try:
            keys = {rank: self._key("at", rank) for rank in range(self.place.size)}
            return {rank: int(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        except (RuntimeError, ValueError):
            return {}

    def sign(self, text: str) -> None:
        """Leaves a sign of life, in place of the last one."""
        self.store.set(self._key("alive", self.place.rank), text)

    def signs(self, ranks: Iterable[int]) -> list[str]:
        """The last sign of each of these ranks, all of which have left one."""
        return [sign.decode() for sign in self.store.multi_get([self._key("alive", rank) for rank in ranks])]

    def own_connection(self) -> dist.Store:
        """The store for one who waits inside it: nobody else can speak through a connection that waits."""
        return self.store.clone()

    def _count(self, topic: str, *, patience_s: float) -> int:
        """Ranks counted in: all of them, or as many as have come in that time."""
        until = time.monotonic() + patience_s
        while (count := self.store.add(f"{ROOT}/{topic}/count", 0)) < self.place.size and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)
        return int(count)

    def _key(self, topic: str, rank: int) -> str:
        return f"{ROOT}/{topic}/{rank}"


def meet(place: Place, *, timeout_s: float) -> Meeting:
    """Connects to the store: torchrun's own, or one that rank 0 opens. Raises RankLost where none can be reached."""
    timeout = timedelta(seconds=timeout_s)
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        else:
            store = dist.TCPStore(
                place.address, place.port, place.size, place.rank == 0,
                timeout=timeout, wait_for_workers=False, multi_tenant=True,
            )  # fmt: skip
    except dist.DistError as error:
        raise RankLost(
            f"rank {place.rank}: no store at {place.address}:{place.port} ({str(error).splitlines()[0]}): rank 0 opens "
            "it; look whether it was started, and whether another process has the port"
        ) from None
    return Meeting(place, store)
