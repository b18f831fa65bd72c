"""The trainer as a whole against plain transformers + PEFT, and what must not change its result."""

import itertools
from pathlib import Path

import pytest
import tiny
import torch
from peft import PeftModel
from rich.console import Console
from torch.nn import functional as F

from gatewright.data.batch import Batch, make_batch
from gatewright.model.adapter_files import save_adapter
from gatewright.spec.run import Run
from gatewright.train import loop
from gatewright.train.optim import learning_rate
from gatewright.train.setup import set_up
from gatewright.train.step import train_step


def run_quietly(run: Run) -> int:
    return loop.train(run, console=Console(quiet=True))


def documents_of(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) of each document of a micro-batch."""
    return list(zip(batch.tokens_T.split(batch.lengths), batch.labels_T.split(batch.lengths), strict=True))


def plain_loop(run: Run, initial: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same run in transformers + PEFT alone: one unpadded document at a time, torch's cross-entropy and AdamW."""
    loader, steps = (trainer := set_up(run, log=lambda event: None)).loader, trainer.steps
    base = tiny.load_plain(Path(run.model.path))
    model = PeftModel.from_pretrained(base, str(initial), is_trainable=True)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=run.train.lr, weight_decay=run.train.weight_decay)
    losses = []
    for step in range(steps):
        batches = loader.step(step)
        targets = sum(batch.target_tokens for batch in batches)
        total = 0.0
        for batch in batches:
            for tokens, labels in documents_of(batch):
                logits = model(input_ids=tokens[None]).logits[0]
                loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, run.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=steps, train=run.train)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3_moe", "mixtral"])
def test_twenty_steps_equal_a_plain_loop(tmp_path: Path, kind: str) -> None:
    run = tiny.make_run(tmp_path, kind, train__steps=20, train__warmup_steps=3, train__weight_decay=0.01)
    start = set_up(run, log=lambda event: None)
    save_adapter(start.model, run.method.adapter, tmp_path / "initial", base=run.model.path)
    wanted_losses, wanted = plain_loop(run, tmp_path / "initial")

    assert run_quietly(run) == 0
    losses = [event["loss"] for event in tiny.events(run, "step")]
    torch.testing.assert_close(losses, wanted_losses, atol=1e-5, rtol=0)
    assert losses[-1] < losses[0] - 0.5
    ours = tiny.read_tensors(run.folder / "adapter")
    assert set(ours) == set(wanted)
    for name, tensor in wanted.items():
        error = (ours[name] - tensor).norm() / tensor.norm()
        assert error < 1e-4, f"{name}: {error:.1e}"


def gradients(run: Run, partition: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first documents, spread over micro-batches as `partition` says."""
    trainer = set_up(run, log=lambda event: None)
    first = trainer.loader.step(0) + trainer.loader.step(1)
    documents = [number for batch in first for number in batch.documents][: sum(partition)]
    cuts = [sum(partition[:i]) for i in range(len(partition) + 1)]
    batches = [make_batch(trainer.loader.view, documents[a:b]) for a, b in itertools.pairwise(cuts)]
    result = train_step(
        trainer.model, trainer.head, trainer.optimizer, trainer.gradients, batches,
        lr=0.0, clip_norm=None, loss_chunk_tokens=run.train.loss_chunk_tokens,
    )  # fmt: skip
    return result.loss, {name: p.grad for name, p in trainer.parameters.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train__checkpointing": "full"},
        {"train__checkpointing": "selective"},
        {"train__loss_chunk_tokens": 3},
    ],
    ids=["partition", "full", "selective", "chunk"],
)
def test_what_must_not_change_the_gradient(tmp_path: Path, changes: dict[str, object]) -> None:
    """Neither the number of micro-batches, nor what is packed with what, nor recomputing, nor the loss's chunks."""
    loss, one = gradients(tiny.make_run(tmp_path, "qwen3_moe"), [8])
    other_loss, many = gradients(tiny.make_run(tmp_path, "qwen3_moe", **changes), [1, 4, 1, 2])
    assert loss == pytest.approx(other_loss, abs=1e-6)
    for name, gradient in one.items():
        torch.testing.assert_close(many[name], gradient, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_routing_of_every_step_is_recorded(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", train__checkpointing="full")
    assert run_quietly(run) == 0
    [model] = tiny.events(run, "model")
    assert model["moe_layers"] == [1, 2] and model["experts"] == 8 and model["top_k"] == 2
    for step in tiny.events(run, "step"):
        assert [sum(row) for row in step["expert_tokens"]] == [2 * step["tokens"]] * 2
        assert step["dropped_tokens"] == 0


def test_full_fine_tuning_moves_everything_but_the_router(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", method__adapter=None)
    assert run_quietly(run) == 0
    before, after = tiny.load_plain(Path(run.model.path)), tiny.load_plain(run.folder / "model")
    for (name, old), (_, new) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(old, new) == ("gate.weight" in name), name


def test_full_fine_tuning_of_tied_embeddings_equals_a_plain_loop(tmp_path: Path) -> None:
    """The head's gradient of the fused loss meets the embedding's on one tensor."""
    run = tiny.make_run(tmp_path, "llama-tied", method__adapter=None, train__clip_norm=None)
    trainer = set_up(run, log=lambda event: None)
    batches = trainer.loader.step(0)
    train_step(
        trainer.model, trainer.head, trainer.optimizer, trainer.gradients, batches,
        lr=0.0, clip_norm=None, loss_chunk_tokens=64,
    )  # fmt: skip
    plain = tiny.load_plain(Path(run.model.path))
    targets = sum(batch.target_tokens for batch in batches)
    for batch in batches:
        for tokens, labels in documents_of(batch):
            logits = plain(input_ids=tokens[None]).logits[0]
            (F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / targets).backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in trainer.parameters.items():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-6, rtol=1e-4)


def test_held_out_loss_and_answers_are_measured_before_and_after(tmp_path: Path) -> None:
    run = tiny.make_run(
        tmp_path, "mixtral", train__steps=30, evaluate__data=str(tmp_path / "heldout.jsonl"), evaluate__every_steps=10,
        evaluate__exact_match=5, evaluate__max_new_tokens=6,
    )  # fmt: skip
    assert run_quietly(run) == 0
    evaluations = tiny.events(run, "evaluate")
    assert [e["step"] for e in evaluations] == [0, 10, 20, 30]
    assert [e["asked"] for e in evaluations] == [5, 0, 0, 5]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] - 0.5
    sample = evaluations[-1]["samples"][0]
    assert sample["prompt"].endswith("<|im_start|>assistant\n")
    assert sample["expected"] in ("Yes.", *map(str, range(100)))


def test_eight_bit_adam_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    straight = tiny.make_run(tmp_path, "llama", run="straight", train__optimizer="adamw8bit")
    assert run_quietly(straight) == 0
    losses = [event["loss"] for event in tiny.events(straight, "step")]
    assert losses[-1] < losses[0]


def test_a_pack_of_one_document_each_is_the_same_training_unpacked(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "qwen3_moe", data__pack=False)
    assert run_quietly(run) == 0
    steps = tiny.events(run, "step")
    assert all(step["micro_batches"] > 2 for step in steps)


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path, "llama", track=["tensorboard"])
    assert run_quietly(run) == 0
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))
