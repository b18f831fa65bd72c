"""Grouped experts with low-rank updates against transformers' eager loop and PEFT's merged weights."""

from copy import deepcopy
from pathlib import Path

import families
import pytest
import tiny
import torch
from adapted import ONE_DOCUMENT, TOKENS, adapted, load, logits

from gatewright.model.adapters import add_adapters
from gatewright.model.expert_lora import DropMask, grouped_mm
from gatewright.model.experts import NAME, find_experts
from gatewright.model.routing import count_routing
from gatewright.spec import run as spec

MOE = ["qwen3_moe", "mixtral"]


@pytest.mark.parametrize("kind", [*MOE, "llama"])
def test_both_seams_leave_the_model_as_it_was(tmp_path: Path, kind: str) -> None:
    folder = tiny.save_model(kind, tmp_path / "m")
    ours = load(folder)(input_ids=TOKENS, **ONE_DOCUMENT).logits
    eager = tiny.load_plain(folder, experts_implementation="eager")(input_ids=TOKENS).logits
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)


def test_initial_values_do_not_depend_on_who_draws_first(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    both, alone = load(folder), load(folder)
    add_adapters(both, spec.Adapter(rank=4, targets=["attention", "experts"]), seed=5)
    torch.rand(100)
    add_adapters(alone, spec.Adapter(rank=4, targets=["experts"]), seed=5)
    drawn = dict(both.named_parameters())
    for name, parameter in alone.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, drawn[name]), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_routing_is_counted_once_and_from_the_choice_itself(tmp_path: Path, checkpointing: bool) -> None:
    """Recomputing a layer in the backward pass must not count its tokens twice."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    model = adapted(folder, spec.Adapter(rank=2, targets=["attention", "experts"])).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen: list[torch.Tensor] = []
    for layer in (1, 2):
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    with count_routing() as routing:
        model(input_ids=TOKENS, **ONE_DOCUMENT).logits.sum().backward()
    wanted = torch.stack([torch.bincount(index.flatten(), minlength=8) for index in chosen[:2]])
    assert len(chosen) == (4 if checkpointing else 2)
    assert torch.equal(routing.stacked(), wanted)
    assert routing.stacked().sum(dim=1).tolist() == [80, 80]


def test_ties_of_bfloat16_are_counted_as_they_were_chosen(tmp_path: Path) -> None:
    """A second top-k, over probabilities rounded to bfloat16, would count other experts for some tokens."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m", num_experts=256, num_experts_per_tok=8)
    model = load(folder, "bfloat16")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in (1, 2):
        gate = model.model.layers[layer].mlp.gate
        gate.register_forward_hook(lambda module, inputs, output: seen.append((output[0], output[2])))
    tokens = torch.randint(0, 90, (1, 400), generator=torch.Generator().manual_seed(3))
    one = {"position_ids": torch.arange(400)[None], "cu_seq_lens_q": torch.tensor([0, 400]).int()}
    with torch.no_grad(), count_routing() as routing:
        model(input_ids=tokens, **one | {"max_length_q": 400})
    chosen = torch.stack([torch.bincount(index.flatten(), minlength=256) for _, index in seen])
    again = [logits.bfloat16().softmax(dim=1).topk(8, dim=1).indices for logits, _ in seen]
    assert torch.equal(routing.stacked(), chosen)
    assert not torch.equal(torch.stack([torch.bincount(index.flatten(), minlength=256) for index in again]), chosen)


def test_an_expert_without_tokens_gets_a_zero_gradient(tmp_path: Path) -> None:
    folder = tiny.save_model("mixtral", tmp_path / "m")
    model = adapted(folder, spec.Adapter(rank=3, targets=["experts"]))
    experts = find_experts(model)[0]
    x = torch.randn(10, 32, requires_grad=True)
    index = torch.tensor([[0, 2]] * 10)
    experts(x, index, torch.full((10, 2), 0.5)).square().sum().backward()
    for factor in (*experts.gatewright_lora.A.values(), *experts.gatewright_lora.B.values()):
        assert factor.grad[1].abs().max() == 0 and factor.grad[3].abs().max() == 0
        assert factor.grad[0].abs().max() > 0
    assert torch.isfinite(x.grad).all()


def test_no_token_at_all_works_in_both_directions(tmp_path: Path) -> None:
    folder = tiny.save_model("mixtral", tmp_path / "m")
    experts = find_experts(adapted(folder, spec.Adapter(rank=3, targets=["experts"])))[0]
    x = torch.randn(0, 32, requires_grad=True)
    experts(x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)).sum().backward()
    assert x.grad.shape == (0, 32)
    assert all(p.grad.abs().max() == 0 for p in experts.gatewright_lora.parameters())


def test_bfloat16_experts_keep_float32_adapters(tmp_path: Path) -> None:
    folder = tiny.save_model("mixtral", tmp_path / "m")
    model = load(folder, "bfloat16")
    add_adapters(model, spec.Adapter(rank=3, targets=["attention", "experts"]), seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    model(input_ids=TOKENS, **ONE_DOCUMENT).logits.float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads)


def test_ours_is_the_implementation_in_force(tmp_path: Path) -> None:
    """The eager loop over trainable experts costs fifty times as much (B15): the model must not fall back to it."""
    model = load(tiny.save_model("qwen3_moe", tmp_path / "m"))
    assert model.config._experts_implementation == NAME
    assert model.config.output_router_logits is False


LEAN = {
    "no adapter": ("qwen3_moe", None),
    "adapter": ("qwen3_moe", {}),
    "dropout": ("qwen3_moe", {"dropout": 0.3}),
    "some experts": ("qwen3_moe", {"chosen": [1, 2, 6]}),
    "some experts, dropout": ("qwen3_moe", {"chosen": [0, 7], "dropout": 0.5}),
    "one of two weights": ("qwen3_moe", {"targets": ["*.experts.down_proj"]}),
    "transposed with bias": ("gpt_oss", {}),
    "transposed with bias, no adapter": ("gpt_oss", None),
    "no gate": ("nemotron_h", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LEAN)
def test_the_lean_backward_equals_autograd(tmp_path: Path, dtype: torch.dtype, case: str) -> None:
    """Gradients of x, of the routing weights and of the adapters, from one kept tensor instead of a dozen."""
    kind, settings = deepcopy(LEAN[case])
    saved = tiny.save_model if kind == "qwen3_moe" else families.save_family
    folder = saved(kind, tmp_path / "m")
    if settings is None:
        model = load(folder)
    else:
        adapter = spec.Adapter(
            rank=3, targets=settings.get("targets", ["experts"]), dropout=settings.get("dropout", 0.0)
        )
        some = settings.get("chosen")
        model = adapted(folder, adapter, chosen={1: some, 2: some} if some else None)
    experts = list(find_experts(model.to(dtype)).values())[-1].train()
    torch.manual_seed(0)
    x = torch.randn(30, experts._parameters["down_proj"].shape[2 if experts.is_transposed else 1], dtype=dtype)
    x.requires_grad_()
    index = torch.rand(30, experts.num_experts).topk(2).indices
    weights = torch.rand(30, 2, dtype=dtype, requires_grad=True)
    inputs = [x, weights, *(p for p in experts.parameters() if p.requires_grad)]
    direction = torch.randn(x.shape, dtype=dtype)

    torch.manual_seed(1)
    lean = experts(x, index, weights)
    lean_grads = torch.autograd.grad(lean, inputs, direction)
    experts._parameters["down_proj"].requires_grad_()  # weights that train take the plain path
    torch.manual_seed(1)
    plain = experts(x, index, weights)
    assert plain.grad_fn.name() != lean.grad_fn.name()
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(lean, plain, atol=tolerance, rtol=tolerance)
    for got, wanted in zip(lean_grads, torch.autograd.grad(plain, inputs, direction), strict=True):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    if settings and settings.get("dropout"):
        assert not torch.allclose(lean, experts(x, index, weights))


def test_dropout_keeps_its_share_and_its_mean() -> None:
    x = torch.ones(400, 100)
    dropped = DropMask(seed=11, probability=0.25)(x)
    assert torch.equal(dropped, DropMask(seed=11, probability=0.25)(x))
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.01
    assert abs(dropped.mean().item() - 1.0) < 0.02


def test_recomputing_a_layer_draws_the_same_dropout(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    model = adapted(folder, spec.Adapter(rank=2, targets=["experts"], dropout=0.3)).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        model.zero_grad()
        logits(model).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_grouped_mm_without_rows_keeps_the_graph() -> None:
    w = torch.randn(2, 4, 4, requires_grad=True)
    grouped_mm(torch.randn(0, 4), w, torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))
