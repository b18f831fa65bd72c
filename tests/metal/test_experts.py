"""Grouped experts with low-rank updates against transformers' eager loop and PEFT's merged weights."""

from pathlib import Path

import pytest
import tiny
import torch
from peft import PeftModel
from torch import nn

from gatewright.model.adapter_files import load_adapter, save_adapter
from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.expert_lora import grouped_mm
from gatewright.model.experts import NAME, find_experts
from gatewright.model.load import load_model
from gatewright.model.routing import count_routing
from gatewright.spec import run as spec

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(7))
ONE_DOCUMENT = {"cu_seq_lens_q": torch.tensor([0, 40], dtype=torch.int32), "max_length_q": 40, "use_cache": False}
MOE = ["qwen3_moe", "mixtral"]


def load(folder: Path, dtype: str = "float32") -> nn.Module:
    model = spec.Model(path=str(folder), dtype=dtype)
    return load_model(model, device=CPU, kernel=choose_kernel(CPU, getattr(torch, dtype)))


def adapted(folder: Path, adapter: spec.Adapter, *, seed: int = 1) -> nn.Module:
    """The model with adapters whose B is not zero, so that they change the output."""
    model = load(folder)
    add_adapters(model, adapter, seed=seed)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ("lora_B" in name or ".B." in name):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("kind", [*MOE, "llama"])
def test_both_seams_leave_the_model_as_it_was(tmp_path: Path, kind: str) -> None:
    folder = tiny.save_model(kind, tmp_path / "m")
    ours = load(folder)(input_ids=TOKENS, **ONE_DOCUMENT).logits
    eager = tiny.load_plain(folder, experts_implementation="eager")(input_ids=TOKENS).logits
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_output_and_gradients_equal_peft(tmp_path: Path, kind: str, rank: int) -> None:
    folder = tiny.save_model(kind, tmp_path / "m")
    adapter = spec.Adapter(rank=rank, alpha=2.0 * rank + 1, targets=["attention", "experts"], rslora=rank == 3)
    ours = adapted(folder, adapter)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"), is_trainable=True)

    out, wanted = ours(input_ids=TOKENS, **ONE_DOCUMENT).logits, theirs(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    out.square().mean().backward()
    wanted.square().mean().backward()

    # The gradients of both, in PEFT's layout: ours are written by the same function as the weights.
    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    save_adapter(ours, adapter, tmp_path / "g", base=str(folder))
    gradients = tiny.read_tensors(tmp_path / "g")
    named = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert set(named) == set(gradients)
    for name, gradient in named.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", MOE)
def test_an_adapter_comes_back_to_the_bit(tmp_path: Path, kind: str) -> None:
    folder = tiny.save_model(kind, tmp_path / "m")
    adapter = spec.Adapter(rank=3, targets=["attention", "experts"])
    first, second = adapted(folder, adapter), load(folder)
    add_adapters(second, adapter, seed=99)
    save_adapter(first, adapter, tmp_path / "a", base=str(folder))
    load_adapter(second, adapter, tmp_path / "a", base=str(folder))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_only_experts_can_be_adapted_and_peft_agrees(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    adapter = spec.Adapter(rank=2, targets=["experts"])
    ours = adapted(folder, adapter)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"))
    torch.testing.assert_close(
        ours(input_ids=TOKENS, **ONE_DOCUMENT).logits, theirs(input_ids=TOKENS).logits, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "targets"), [("qwen3_moe", ["mlp", "experts"]), ("qwen2_moe", ["shared_experts", "attention"])]
)
def test_linear_layers_of_a_moe_reach_peft_under_their_own_name(tmp_path: Path, kind: str, targets: list[str]) -> None:
    """Named as modules, PEFT 0.21 would hang these adapters on the fused experts instead."""
    folder = tiny.save_model(kind, tmp_path / "m")
    adapter = spec.Adapter(rank=2, targets=targets)
    ours = adapted(folder, adapter)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"))
    torch.testing.assert_close(
        ours(input_ids=TOKENS, **ONE_DOCUMENT).logits, theirs(input_ids=TOKENS).logits, atol=1e-5, rtol=1e-5
    )
    loaded = sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n)
    assert loaded == sum(p.numel() for p in ours.parameters() if p.requires_grad)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [True, False])
def test_the_lean_backward_equals_autograd(tmp_path: Path, dtype: torch.dtype, lora: bool) -> None:
    """Gradients of x, of the routing weights and of the adapters, from one kept tensor instead of a dozen."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    model = adapted(folder, spec.Adapter(rank=3, targets=["experts"])) if lora else load(folder)
    experts = find_experts(model.to(dtype))[1]
    torch.manual_seed(0)
    x = torch.randn(30, 32, dtype=dtype, requires_grad=True)
    index = torch.rand(30, 8).topk(2).indices
    weights = torch.rand(30, 2, dtype=dtype, requires_grad=True)
    inputs = [x, weights, *(p for p in experts.parameters() if p.requires_grad)]
    direction = torch.randn(30, 32, dtype=dtype)

    lean = experts(x, index, weights)
    lean_grads = torch.autograd.grad(lean, inputs, direction)
    for name in ("gate_up_proj", "down_proj"):
        experts._parameters[name].requires_grad_()  # weights that train take the plain path
    plain = experts(x, index, weights)
    assert plain.grad_fn.name() != lean.grad_fn.name()
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(lean, plain, atol=tolerance, rtol=tolerance)
    for got, wanted in zip(lean_grads, torch.autograd.grad(plain, inputs, direction), strict=True):
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_grouped_mm_without_rows_keeps_the_graph() -> None:
    w = torch.randn(2, 4, 4, requires_grad=True)
    grouped_mm(torch.randn(0, 4), w, torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))
