"""The verb `train`: a run file, the layout it leaves open, and the run itself, on one rank or many."""

from pathlib import Path
from typing import Annotated

import typer

from gatewright.cli_quiet import quiet_libraries


def train(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", show_default=False, help="What to train.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.lr=1e-4. May be repeated."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", min=1, help="Ranks to start on this machine, one a GPU.")
    ] = None,
) -> None:
    """Train as a run file says. Started again, it goes on from the last checkpoint.

    Many ranks: --nproc on one machine, or this same command under torchrun, or under srun with a task a GPU.
    """
    from rich.console import Console

    from gatewright.spec.read import read_run

    run = read_run(run_file, overrides or [])
    quiet_libraries()
    if nproc is not None and nproc > 1:
        from gatewright.parallel.launch import start_ranks
        from gatewright.parallel.layout import layout_of

        layout_of(run.parallel, ranks=nproc)
        settings = [part for override in overrides or [] for part in ("--set", override)]
        raise typer.Exit(start_ranks(["train", str(run_file), *settings], ranks=nproc))

    from gatewright.parallel.place import find_place
    from gatewright.planner.catalogue import find_device
    from gatewright.planner.start import Devices, choose_layout, yardstick
    from gatewright.train.device import device_memory_bytes, device_name, pick_device
    from gatewright.train.loop import train as train_run

    place = find_place()
    device = pick_device(place.local_rank)
    name = device_name(device)
    gpu = find_device(name, memory_bytes=device_memory_bytes(device))
    devices = Devices(ranks=place.size, per_node=place.local_size, device=name, gpu=gpu)
    chosen = choose_layout(run, devices)
    measure = yardstick(chosen.run, devices)
    raise typer.Exit(train_run(chosen.run, console=Console(), why=chosen.reason, yardstick=measure))
