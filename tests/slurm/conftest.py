"""A real SLURM for the tests of this folder, started once; without its programs they are skipped, and say so."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, missing_programs

sys.path.insert(0, str(Path(__file__).parent.parent / "metal"))  # for tiny, the models of a few thousand weights


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if missing := missing_programs():
        pytest.skip(
            f"no SLURM on this machine ({', '.join(missing)} missing): apt-get install slurm-wlm munge, as root"
        )
    with Lab() as running:
        yield running


@pytest.fixture(autouse=True)
def clean(lab: Lab) -> Iterator[None]:
    """Every test finds an empty queue and nodes that work, and leaves no process behind."""
    yield
    if ids := lab.job_ids():
        lab.run("scancel", *ids, check=False)
        lab.run("scancel", "--signal=KILL", "--full", *ids, check=False)
    for node in range(1, lab.nodes + 1):
        lab.run("scontrol", "update", f"nodename=n{node}", "state=resume", check=False)
    lab.wait_for(lambda: not lab.job_ids(), "the queue to be empty", within_s=30)
    lab.wait_for(lambda: lab.idle_nodes() == lab.nodes, "the nodes to be idle", within_s=30)
