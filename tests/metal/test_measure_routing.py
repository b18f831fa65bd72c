"""Measuring a run's routing: block counts are those of the choices themselves, whatever shares a batch with what."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_run

from gatewright.data.batch import make_batch
from gatewright.model.experts import find_experts
from gatewright.router.blocks import read_record
from gatewright.spec.errors import ModelError
from gatewright.spec.event import Event
from gatewright.train.forward import hidden_states
from gatewright.train.measure_routing import measure_run
from gatewright.train.record_routing import record_routing
from gatewright.train.setup import set_up


def quiet(event: Event) -> None:
    """What a run says at its start is not looked at here."""


def test_blocks_hold_what_the_router_chose_for_their_tokens(tmp_path: Path) -> None:
    """Against the router's own logits, one document at a time."""
    trainer = set_up(make_run(tmp_path, "qwen3_moe"), log=quiet)
    view, documents = trainer.loader.view, [0, 3, 4, 17]
    record = record_routing(trainer.model, view, documents, batch_tokens=200, device=trainer.device, block_tokens=16)
    assert record.layers == (1, 2), "the first layer of this model is dense"
    assert (record.top_k, record.experts) == (2, 8)
    for number in documents:
        logits = {}
        handles = [
            module.register_forward_hook(lambda m, i, out, name=name, logits=logits: logits.__setitem__(name, out[0]))
            for name, module in trainer.model.named_modules()
            if name.endswith("mlp.gate")
        ]
        with torch.no_grad():
            hidden_states(trainer.model, make_batch(view, [number]))
        for handle in handles:
            handle.remove()
        mine = record.only(np.array([number]))
        assert mine.tokens.sum() == view.lengths[number]
        for row, name in enumerate(sorted(logits)):
            chosen = logits[name].topk(2, dim=-1).indices
            for block, part in enumerate(chosen.split(16)):
                counts = torch.bincount(part.flatten(), minlength=8).tolist()
                assert mine.counts[block, row].tolist() == counts


def test_what_shares_a_batch_with_what_changes_nothing(tmp_path: Path) -> None:
    trainer = set_up(make_run(tmp_path, "mixtral"), log=quiet)
    trainer.model.train()
    view, numbers = trainer.loader.view, list(range(20))
    alone, together = (
        record_routing(trainer.model, view, numbers, batch_tokens=size, device=trainer.device, block_tokens=8)
        for size in (1, 500)
    )
    assert np.array_equal(alone.counts, together.counts)
    assert trainer.model.training, "left as it was found"
    assert all(not module._forward_pre_hooks for module in find_experts(trainer.model).values())


def test_a_run_leaves_a_record_in_its_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path, "qwen3_moe")
    path, record = measure_run(run, documents=25, log=quiet)
    assert path == run.folder / "routing.npz"
    again = read_record(path)
    assert again.documents == 25
    assert np.array_equal(again.counts, record.counts)
    assert list(run.folder.glob(".partial*")) == []
    assert measure_run(run, documents=10**6, log=quiet)[1].documents == 60, "no more than there are"


def test_a_dense_model_has_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dense model"):
        measure_run(make_run(tmp_path, "llama"), documents=5, log=quiet)


def test_a_result_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="adapter"):
        measure_run(make_run(tmp_path, "qwen3_moe"), documents=5, trained=True, log=quiet)
