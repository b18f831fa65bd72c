"""What a finished run leaves: its adapter or its model, as one process would write it, and the tokenizer beside it."""

import os
import shutil
from pathlib import Path

from gatewright.model.adapter_files import in_host, take_adapter
from gatewright.parallel.collect import whole_adapters, whole_state
from gatewright.spec.run import Run
from gatewright.train.prove_adapter import prove_reload, prove_written
from gatewright.train.setup import Trainer


def output_folder(run: Run) -> Path:
    """Where the finished adapter, or the fully fine-tuned model, lies."""
    return run.folder / ("adapter" if run.method.adapter else "model")


def write_output(run: Run, trainer: Trainer) -> None:
    """The finished adapter or model, as one process would write it; all ranks must call this."""
    final = output_folder(run)
    partial = final.with_name(f".partial-{final.name}")
    if run.adapter:
        base, host = run.model.path, in_host if trainer.ranks.first else None
        with whole_adapters(trainer.model, trainer.ranks) as parts:
            files = take_adapter(trainer.model, run.adapter, base=base, host=host, parts=parts)
            if files is None:
                return
            shutil.rmtree(partial, ignore_errors=True)
            files.write(partial)
            prove_written(files, partial, model=trainer.model, adapter=run.adapter, base=base)
        if trainer.ranks.alone:
            batch = trainer.loader.step(0)[0].to(trainer.device)
            prove_reload(trainer.model, trainer.head, run.adapter, partial, base=base, batch=batch)
    else:
        state = None if trainer.ranks.alone else whole_state(trainer.model, trainer.ranks)
        if not trainer.ranks.first:
            return
        shutil.rmtree(partial, ignore_errors=True)
        trainer.model.save_pretrained(partial, state_dict=state)
    trainer.tokenizer.save_pretrained(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
