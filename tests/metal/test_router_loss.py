"""The router's own losses: their scale, and what must not change their gradient."""

import itertools
from pathlib import Path

import pytest
import tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, PreTrainedModel

from gatewright.data.batch import Batch, make_batch
from gatewright.model.experts import find_experts
from gatewright.model.routing import Router, RouterWatch, Seen, find_routers, probabilities, score_function
from gatewright.spec.errors import ModelError
from gatewright.spec.run import Run
from gatewright.train.forward import hidden_states
from gatewright.train.router_loss import RouterLoss, shares
from gatewright.train.setup import Trainer, set_up
from gatewright.train.step import train_step

CPU = torch.device("cpu")


def start(run: Run) -> Trainer:
    """A trainer whose routers train, besides the adapters."""
    trainer = set_up(run, log=lambda event: None)
    assert trainer.router
    for router in trainer.router.routers:
        router.weight.requires_grad_(True)
    return trainer


def cut(trainer: Trainer, partition: list[int]) -> list[Batch]:
    """The first documents of the data in micro-batches of so many."""
    first = [number for step in range(3) for batch in trainer.loader.step(step) for number in batch.documents]
    cuts = [sum(partition[:i]) for i in range(len(partition) + 1)]
    return [make_batch(trainer.loader.view, first[a:b]) for a, b in itertools.pairwise(cuts)]


def router_gradients(run: Run, partition: list[int]) -> tuple[list[torch.Tensor], float | None, float | None]:
    """Gradients of all routers, and the values of both losses, over one step cut into such micro-batches."""
    trainer = start(run)
    assert trainer.router
    result = train_step(
        trainer.model, trainer.head, trainer.optimizer, trainer.gradients, cut(trainer, partition),
        lr=0.0, clip_norm=None, loss_chunk_tokens=64, router=trainer.router.loss,
    )  # fmt: skip
    return [router.weight.grad for router in trainer.router.routers], result.balance_loss, result.z_loss


@pytest.mark.parametrize(
    "changes",
    [
        {"router__balance": 0.5},
        {"router__balance": 0.5, "router__balance_over": "sequence"},
        {"router__z": 0.1},
        {"router__balance": 0.5, "train__checkpointing": "full"},
        {"router__balance": 0.5, "router__balance_over": "sequence", "router__z": 0.1, "train__checkpointing": "full"},
    ],
    ids=["global", "sequence", "z", "global-recomputed", "all-recomputed"],
)
def test_neither_micro_batches_nor_packing_nor_recomputing_change_the_gradient(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    plain = {k: v for k, v in changes.items() if k != "train__checkpointing"}
    one, *values = router_gradients(tiny.make_run(tmp_path, "qwen3_moe", **plain), [8])
    many, *other_values = router_gradients(tiny.make_run(tmp_path, "qwen3_moe", **changes), [1, 4, 1, 2])
    assert [v or 0.0 for v in values] == pytest.approx([v or 0.0 for v in other_values], rel=1e-5)
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-7)
    without, *_ = router_gradients(tiny.make_run(tmp_path, "qwen3_moe"), [8])
    assert all((a - b).norm() > 1e-3 * b.norm() for a, b in zip(one, without, strict=True)), "the loss pulls"


def test_the_gradient_is_that_of_the_formula(tmp_path: Path) -> None:
    """Against autograd over logits that are kept: the mean over layers of E·Σ f·P and of logsumexp²."""
    run = tiny.make_run(tmp_path, "qwen3_moe", router__balance=0.5, router__z=0.1)
    ours, balance, z = router_gradients(run, [3, 5])
    plain, *_ = router_gradients(tiny.make_run(tmp_path, "qwen3_moe"), [3, 5])

    trainer = start(run)
    assert trainer.router
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for router in trainer.router.routers:
        router.module.register_forward_hook(
            lambda module, inputs, output, layer=router.layer: kept.__setitem__(layer, (output[0], output[2]))
        )
    [batch] = cut(trainer, [8])
    trainer.model.train()
    hidden_states(trainer.model, batch)
    balances, zs = [], []
    for logits, index in kept.values():
        experts = logits.shape[1]
        share = torch.bincount(index.flatten(), minlength=experts) / index.numel()
        balances.append(experts * (share * logits.softmax(dim=1).mean(dim=0)).sum())
        zs.append(logits.logsumexp(dim=1).square().mean())
    assert balance == pytest.approx(torch.stack(balances).mean().item(), rel=1e-5)
    assert z == pytest.approx(torch.stack(zs).mean().item(), rel=1e-5)
    (0.5 * torch.stack(balances).mean() + 0.1 * torch.stack(zs).mean()).backward()
    for router, with_losses, without in zip(trainer.router.routers, ours, plain, strict=True):
        torch.testing.assert_close(with_losses - without, router.weight.grad, rtol=1e-3, atol=1e-6)


class Lone(nn.Module):
    """A router that gives what it is told to."""

    def __init__(self, logits_TE: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(logits_TE)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights, index = self.weight.softmax(dim=1).topk(2, dim=1)
        return self.weight, weights, index


def balance_of(logits_LTE: list[torch.Tensor]) -> float:
    """The balance loss of layers that give these logits."""
    routers = [Router(i, f"layers.{i}.gate", Lone(logits), None) for i, logits in enumerate(logits_LTE)]
    watch = RouterWatch(routers)
    loss = RouterLoss(watch=watch, over="global", balance=1.0, z=0.0)
    counts = torch.stack([torch.bincount(r.module()[2].flatten(), minlength=logits_LTE[0].shape[1]) for r in routers])
    loss.share_LE = shares(counts)
    tokens = len(logits_LTE[0])
    ends, none = torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    batch = Batch(tokens_T=none, labels_T=none, positions_T=none, cu_seqlens_S1=ends, lengths=(tokens,), documents=(0,))
    loss.begin_step(step_tokens=tokens)
    loss.begin(batch)
    for router in routers:
        router.module()
    loss.end()
    value, _ = loss.finish_step(*loss.sums(), counts)
    assert value is not None
    return value


def test_balanced_is_one_whatever_the_number_of_experts_and_choices() -> None:
    for experts in (4, 16):
        tokens = torch.arange(experts)
        logits = torch.zeros(experts, experts)
        logits[tokens, tokens] = logits[tokens, (tokens + 1) % experts] = 3.0
        assert balance_of([logits]) == pytest.approx(1.0, abs=1e-5)


def test_layers_that_collapse_on_different_experts_do_not_cancel() -> None:
    """Pooled over layers, as transformers does it, eight layers on two experts each of sixteen look balanced."""
    layers = []
    for layer in range(8):
        logits = torch.full((32, 16), -10.0)
        logits[:, 2 * layer : 2 * layer + 2] = 10.0
        layers.append(logits)
    assert balance_of(layers) == pytest.approx(8.0, rel=1e-3)  # E / k: the largest value there is


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    trainer = start(tiny.make_run(tmp_path, "qwen3_moe", router__balance=0.1))
    assert trainer.router
    trainer.model.gradient_checkpointing_enable({"use_reentrant": True})
    trainer.model.enable_input_require_grads()
    with pytest.raises(ModelError, match="re-entrant"):
        train_step(
            trainer.model, trainer.head, trainer.optimizer, trainer.gradients, cut(trainer, [4]),
            lr=0.0, clip_norm=None, loss_chunk_tokens=64, router=trainer.router.loss,
        )  # fmt: skip


def deepseek() -> PreTrainedModel:
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, head_dim=8,
        layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(("make", "wanted"), [(deepseek, "sigmoid"), (gpt_oss, "softmax")])
def test_the_score_function_is_told_from_what_the_router_does(make: object, wanted: str) -> None:
    model = make()  # type: ignore[operator]
    with torch.no_grad():
        for router in find_routers(model, find_experts(model)):
            router.weight.normal_(std=0.5)
    watch = RouterWatch(find_routers(model, find_experts(model)))
    watch.recording = True
    with torch.no_grad():
        model(input_ids=torch.arange(24)[None])
    seen: Seen = watch.seen[max(watch.seen)]
    torch.testing.assert_close(seen.scores_TE, probabilities(wanted, seen.logits_TE.float()))
    torch.testing.assert_close(seen.scores_TE.sum(dim=1), torch.ones(24))


def test_routing_weights_of_no_known_function_are_refused() -> None:
    torch.manual_seed(0)
    logits, index = torch.randn(50, 8), torch.randint(0, 8, (50, 2))
    with pytest.raises(ModelError, match="no known function"):
        score_function(Router(0, "layers.0.gate", nn.Linear(8, 8), None), logits, torch.rand(50, 2) + 0.1, index)
