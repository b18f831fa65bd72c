"""What a legality rule is, and what it judges."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gatewright.planner.job import Job
from gatewright.spec.hardware import Cluster

Backend = Literal["gatewright", "transformers", "deepspeed", "deepspeed-autoep", "fsdp1", "fsdp2", "megatron"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job on a cluster, run by a backend."""

    job: Job
    cluster: Cluster
    backend: Backend = "gatewright"
    micro_batches: int | None = None
    """Of one optimizer step on one pipeline; None: enough."""


Verdict = Callable[[Setting], str]
"""Says why a setting breaks a rule, with the numbers and what would be legal; empty where the rule holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    id: str
    title: str
    backends: tuple[Backend, ...]
    """Empty: every backend."""
    version: str
    """Versions it was read in or measured on."""
    source: str
    broken: Verdict

    @property
    def holds_for(self) -> str:
        return f"{', '.join(self.backends) or 'any backend'}, {self.version}"


class Rules(list[Rule]):
    """Rules in the order they are written in a file."""

    def rule(
        self, name: str, *, title: str, version: str, source: str, backends: tuple[Backend, ...] = ()
    ) -> Callable[[Verdict], Verdict]:
        """Adds the function below as a rule of this id."""

        def write(broken: Verdict) -> Verdict:
            self.append(Rule(id=name, title=title, backends=backends, version=version, source=source, broken=broken))
            return broken

        return write


def divisors(number: int) -> str:
    """The first dozen, for a sentence."""
    found = [str(value) for value in range(1, number + 1) if number % value == 0]
    return ", ".join(found[:12])
