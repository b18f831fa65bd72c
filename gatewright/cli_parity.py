"""`gatewright check RUN.yaml --parity`: whether divided experts compute on this machine what whole ones do."""

from pathlib import Path

import typer

from gatewright.spec.errors import UserError


def prove_parity(files: list[Path], *, nproc: int | None) -> int:
    """Runs the proof for one run file on this process's ranks, or on `nproc` that it starts; the exit code."""
    from gatewright.spec.read import read_run

    if len(files) != 1:
        raise UserError(f"--parity takes one run file, got {len(files)} files")
    run = read_run(files[0])

    import torch

    from gatewright.model.load import read_config
    from gatewright.parallel.launch import start_ranks
    from gatewright.parallel.layout import layout_of
    from gatewright.parallel.parity import compare
    from gatewright.parallel.place import find_place
    from gatewright.parallel.ranks import join_ranks
    from gatewright.train.device import pick_device

    place = find_place()
    layout = layout_of(run.parallel, ranks=nproc or place.size)
    if layout.ep == 1:
        raise UserError("--parity compares divided experts with whole ones: the run file needs parallel.ep above 1")
    if nproc is not None and nproc > 1:
        return start_ranks(["check", str(files[0]), "--parity"], ranks=nproc)
    config = read_config(Path(run.model.path), trust_remote_code=run.model.trust_remote_code)
    device, dtype = pick_device(place.local_rank), getattr(torch, run.model.dtype)
    with join_ranks(place, layout, device=device, timeout_s=run.timeout_s) as ranks:
        found = compare(config, ranks, dtype=dtype, quantize=run.method.quantize)
    if ranks.first:
        kept = run.method.quantize
        stored = run.model.dtype if kept == "none" else f"{run.model.dtype}, experts in {kept}"
        verdict = "the same within" if found.holds else "NOT the same within"
        typer.echo(
            f"{layout.describe()}, {device.type}, {stored}: divided experts compute {verdict} "
            f"{found.tolerance:g} (outputs differ by {found.output:.1e}, gradients by {found.gradients:.1e})"
        )
    return 0 if found.holds else 1
