"""A checkpoint of many ranks as one process would have written it."""

import shutil
from pathlib import Path

from gatewright.spec.errors import CheckpointError
from gatewright.train import checkpoint
from gatewright.train.pieces import SavedState, write_pieces
from gatewright.train.save import save
from gatewright.train.state import OPTIMIZER, WEIGHTS, read_progress


def consolidate(source: Path, root: Path) -> checkpoint.Checkpoint:
    """Writes the checkpoint `source` anew under `root`, every tensor whole and in one file.

    Of the random numbers' states only the first rank's is kept. Raises CheckpointError for a source that does not
    verify, and where the disk refuses.
    """
    fault = checkpoint.verify(source)
    if fault is not None:
        raise CheckpointError(f"{source}: not consolidated: {fault}")
    saved, step = SavedState(source), read_progress(source).step

    def write(folder: Path) -> list[Path]:
        tensors = saved.of_rank(0, "rng/")
        for prefix in (WEIGHTS, OPTIMIZER, "router/"):
            tensors |= saved.common(prefix)
        write_pieces(folder, tensors, parts={}, rank=0, ranks=1)
        shutil.copyfile(source / "state.json", folder / "state.json")
        if (source / "adapter").is_dir():
            shutil.copytree(source / "adapter", folder / "adapter")
        return [file for file in folder.rglob("*") if file.is_file()]

    return save(root, step=step, write=write)
