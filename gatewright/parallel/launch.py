"""Starting ranks on this machine with torch's own elastic launcher, as `torchrun --standalone` does."""

import logging
import os
import signal
import sys
import uuid

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
INTERRUPTED, SAVED = 130, 85
"""Exit codes of a run that saved and left: after Ctrl-C, and at any other signal (train/loop.py)."""
PATIENCE_S = 600
"""After a signal, how long ranks may take to finish their step and save before they are killed."""


def start_ranks(arguments: list[str], *, ranks: int) -> int:
    """Runs `python -m gatewright ARGUMENTS` as `ranks` processes and returns the exit code of the first that failed.

    A signal to this process is passed on to all of them; each finishes its step, saves, and leaves.
    """
    # Its summary of failures repeats, at length and without the reason, what the ranks have said.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(SIGNALS),
        shutdown_timeout=PATIENCE_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "gatewright", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"rank {rank} was ended by {name}; the others were stopped", file=sys.stderr)
            return 1
        return failure.exitcode
    except SignalException as stopped:
        return INTERRUPTED if stopped.sigval == signal.SIGINT else SAVED
    return 0
