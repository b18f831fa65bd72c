"""What we adapt, save and load is what stock PEFT makes of it: logits, gradients, and files in both directions."""

from pathlib import Path

import families
import pytest
import tiny
import torch
from adapted import TOKENS, adapted, load, logits, our_gradients, peft_gradients
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from gatewright.model.adapter_files import WEIGHTS, load_adapter, save_adapter
from gatewright.model.adapters import add_adapters
from gatewright.spec import run as spec

KINDS = {
    "plain": ("tiny", "qwen3_moe", ["attention", "experts"], {"rank": 3}),
    "plain, dense layers too": ("tiny", "qwen3_moe", ["mlp", "experts"], {"rank": 8}),
    "shared experts beside": ("tiny", "qwen2_moe", ["attention", "experts", "shared_experts"], {"rank": 4}),
    "transposed, with bias, gated its own way": ("family", "gpt_oss", ["attention", "experts"], {"rank": 3}),
    "no gate": ("family", "nemotron_h", ["experts", "shared_experts"], {"rank": 5}),
    "rank-stabilised": ("tiny", "mixtral", ["experts"], {"rank": 1, "alpha": 7.0, "rslora": True}),
    "router as low rank": ("tiny", "mixtral", ["router", "experts"], {"rank": 2}),
    "router in full": ("tiny", "qwen3_moe", ["experts"], {"rank": 2, "full": ["router", "norm"]}),
    "router with a bias in full": ("family", "gpt_oss", ["experts"], {"rank": 2, "full": ["router"]}),
    "router and the gate of shared experts in full": (
        "tiny",
        "qwen2_moe",
        ["attention"],
        {"rank": 2, "full": ["router"]},
    ),
    "bias-balanced router in full": ("family", "deepseek_v3", ["experts"], {"rank": 2, "full": ["router"]}),
    "grouped output projection": ("family", "deepseek_v4", ["attention", "experts"], {"rank": 2}),
    "embedding and head": ("tiny", "qwen3_moe", ["embedding", "head", "experts"], {"rank": 3}),
    "embedding and head of a dense model": ("tiny", "llama", ["attention", "embedding", "head"], {"rank": 3}),
    "embedding and head in full": ("tiny", "llama", ["mlp"], {"rank": 2, "full": ["embedding", "head", "norm"]}),
    "patterns": ("tiny", "qwen3_moe", ["*.q_proj", "*.layers.1.mlp.experts.down_proj", "*.0.mlp.up_proj"], {"rank": 2}),
}


def save_base(source: str, name: str, folder: Path) -> Path:
    return tiny.save_model(name, folder) if source == "tiny" else families.save_family(name, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_stock_peft_loads_ours_with_equal_logits_and_gradients(tmp_path: Path, kind: str) -> None:
    source, name, targets, settings = KINDS[kind]
    folder = save_base(source, name, tmp_path / "m")
    adapter = spec.Adapter(targets=targets, **settings)
    ours = adapted(folder, adapter)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"), is_trainable=True)

    out, wanted = logits(ours), theirs(input_ids=TOKENS, use_cache=False).logits
    bare = logits(load(folder))
    assert (out - bare).abs().max() > 1e-2
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    out.square().mean().backward()
    wanted.square().mean().backward()
    got, want = our_gradients(ours, adapter), peft_gradients(theirs)
    assert set(got) == set(want)
    for key, gradient in want.items():
        torch.testing.assert_close(got[key], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_comes_back_to_the_bit(tmp_path: Path, kind: str) -> None:
    source, name, targets, settings = KINDS[kind]
    folder = save_base(source, name, tmp_path / "m")
    adapter = spec.Adapter(targets=targets, **settings)
    first, second = adapted(folder, adapter), load(folder)
    add_adapters(second, adapter, seed=99)
    save_adapter(first, adapter, tmp_path / "a", base=str(folder))
    load_adapter(second, adapter, tmp_path / "a", base=str(folder))
    for (parameter, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), parameter


@pytest.mark.parametrize(
    ("source", "name", "targets", "config"),
    [
        ("tiny", "qwen3_moe", ["attention", "experts"], {}),
        ("tiny", "mixtral", ["experts"], {"use_rslora": True}),
        ("family", "gpt_oss", ["attention", "experts"], {}),
        ("tiny", "llama", ["attention", "embedding", "head"], {"target_modules": ["embed_tokens", "lm_head"]}),
        ("tiny", "qwen3_moe", ["experts"], {"modules_to_save": ["mlp.gate"]}),
    ],
)
def test_an_adapter_made_by_peft_loads_into_ours(
    tmp_path: Path, source: str, name: str, targets: list[str], config: dict[str, object]
) -> None:
    folder = save_base(source, name, tmp_path / "m")
    torch.manual_seed(5)
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"] if "attention" in targets else []
    modules = [*attention, *config.pop("target_modules", [])]
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if "experts" in targets else None
    made = LoraConfig(
        r=4, lora_alpha=6, target_modules=modules, target_parameters=parameters, init_lora_weights=False, **config
    )
    theirs = get_peft_model(tiny.load_plain(folder), made)
    theirs.save_pretrained(tmp_path / "a")

    full = ["router"] if config.get("modules_to_save") else []
    adapter = spec.Adapter(rank=4, alpha=6.0, targets=targets, rslora=bool(config.get("use_rslora")), full=full)
    ours = load(folder)
    add_adapters(ours, adapter, seed=0)
    load_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    wanted = theirs(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits(ours), wanted, atol=1e-5, rtol=1e-5)
    assert (wanted - logits(load(folder))).abs().max() > 1e-2


def test_a_weight_that_trains_in_full_is_held_in_float32(tmp_path: Path) -> None:
    """In bfloat16 an AdamW step of 1e-4 is lost on most weights; the model still sees its own type."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    adapter = spec.Adapter(rank=2, targets=["experts"], full=["router", "head", "embedding"])
    model = load(folder, "bfloat16")
    gate = model.model.layers[1].mlp.gate
    before = gate.weight.detach().clone()
    add_adapters(model, adapter, seed=0)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert gate.weight.dtype == torch.bfloat16 and torch.equal(gate.weight, before)
    logits(model).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    save_adapter(model, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"))
    assert torch.equal(theirs.base_model.model.model.layers[1].mlp.gate.weight.bfloat16(), before)


def test_experts_without_a_pair_are_zero_in_the_file_and_stay_as_they_are(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    adapter = spec.Adapter(
        rank=3,
        targets=["experts"],
        experts={"layers": [{"layer": 1, "experts": [0, 5]}, {"layer": 2, "experts": [1, 2, 7]}]},
    )
    chosen = {1: [0, 5], 2: [1, 2, 7]}
    ours = adapted(folder, adapter, chosen=chosen)
    assert ours.model.layers[1].mlp.experts.gatewright_lora.A["down_proj"].shape == (2, 3, 24)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    whole = load_file(tmp_path / "a" / WEIGHTS)
    a = whole["base_model.model.model.layers.1.mlp.experts.lora_A.weight"].unflatten(0, (8, 3))
    assert [e for e in range(8) if a[e].any()] == [0, 5]

    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"), is_trainable=True)
    out, wanted = logits(ours), theirs(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    out.square().mean().backward()
    wanted.square().mean().backward()
    want = peft_gradients(theirs)
    for key, gradient in our_gradients(ours, adapter).items():
        kept = gradient != 0
        assert kept.any()
        torch.testing.assert_close(gradient[kept], want[key][kept], atol=1e-5, rtol=1e-5)


def test_a_layer_without_chosen_experts_is_not_adapted(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    adapter = spec.Adapter(rank=3, targets=["experts"], experts={"layers": [{"layer": 2, "experts": [7, 1]}]})
    ours = adapted(folder, adapter, chosen={2: [1, 7]})
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"))
    assert {n.split(".layers.")[1][0] for n, _ in theirs.named_parameters() if "lora_" in n} == {"2"}
    torch.testing.assert_close(logits(ours), theirs(input_ids=TOKENS, use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_dropout_is_written_where_peft_can_read_it_and_does_not_act_afterwards(tmp_path: Path) -> None:
    """PEFT refuses dropout on parameters, so its config has none there; ours keeps what training used."""
    folder = tiny.save_model("qwen3_moe", tmp_path / "m")
    adapter = spec.Adapter(rank=2, targets=["attention", "experts"], dropout=0.4)
    ours = adapted(folder, adapter)
    save_adapter(ours, adapter, tmp_path / "a", base=str(folder))
    assert '"dropout": 0.4' in (tmp_path / "a" / "gatewright.json").read_text()
    theirs = PeftModel.from_pretrained(tiny.load_plain(folder), str(tmp_path / "a"))
    ours.eval()
    torch.testing.assert_close(logits(ours), theirs(input_ids=TOKENS, use_cache=False).logits, atol=1e-5, rtol=1e-5)
    ours.train()
    assert not torch.equal(logits(ours), logits(ours))
