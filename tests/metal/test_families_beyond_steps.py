"""What else a family must do: decode as it trained, be rehearsed without weights, load out of a composite, refuse."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, SIZES, save_family
from test_families import CPU, DOCUMENTS, document, pack, step
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.head import head_of
from gatewright.model.load import load_model
from gatewright.model.per_document import choose_mixing, describe
from gatewright.probe.rehearsal import rehearse
from gatewright.spec.errors import ModelError
from gatewright.spec.run import Adapter, Model, Run
from gatewright.train.evaluate import Question, answer
from gatewright.train.forward import hidden_states
from gatewright.train.prove import prove_head, prove_isolation


class Numbers:
    """A tokenizer whose text is the token numbers."""

    all_special_ids = (2,)
    eos_token_id = 2

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(t)) for t in tokens)


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    kernel = choose_kernel(CPU, getattr(torch, dtype))
    return load_model(Model(path=str(folder), dtype=dtype), device=CPU, kernel=kernel).eval()


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma2", "deepseek_v4", "glm_moe_dsa", "llama4", "minimax", "lfm2", "bamba", "qwen3_next"]
)
@torch.no_grad()
def test_greedy_answers_are_what_the_trained_forward_says(name: str, tmp_path: Path) -> None:
    """Two prompts of unequal length: padding moves no answer, where attention has no SDPA eager serves."""
    model = load(save_family(name, tmp_path))
    head = head_of(model)
    prompts = [document(length, 50 + length).tolist() for length in (9, 4)]
    given = answer(model, Numbers(), [Question(p, [5, 2]) for p in prompts], max_new_tokens=4, device=CPU)
    for prompt, got in zip(prompts, given, strict=True):
        tokens = list(prompt)
        for token in map(int, got.split()):
            assert token == int(head.logits(hidden_states(model, pack([torch.tensor(tokens)])))[-1].argmax())
            tokens.append(token)
        assert len(tokens) > len(prompt)


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "deepseek_v32", "llama4"])
def test_a_rehearsal_runs_what_has_no_seam(name: str) -> None:
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type or name, **SIZES | family.config)
    run = Run.model_validate(
        {
            "run": "rehearsed",
            "model": {"path": "tiny", "dtype": "bfloat16"},
            "method": {"adapter": {"rank": 4, "targets": list(family.targets)}},
            "data": {"train": "none.jsonl"},
            "train": {"tokens_per_step": 100, "steps": 1, "lr": 1e-3},
        }
    )
    done = rehearse(run, lengths=[5, 1 + 19, 40], config=config)
    assert done.resident_bytes > 2 * done.parameters
    assert max(phase.bytes for phase in done.phases) > done.resident_bytes


VISION = {
    "qwen3_5_moe": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    },
    "gemma3": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 28,
        "patch_size": 14,
    },
}  # fmt: skip


@pytest.mark.parametrize(("composite", "text"), [("qwen3_5_moe", "qwen3_5_moe"), ("gemma3", "gemma3_text")])
def test_a_checkpoint_with_a_vision_tower_trains_on_text(composite: str, text: str, tmp_path: Path) -> None:
    """Published files of these families hold both; the adapters must be those of the text model alone."""
    inner = SIZES | FAMILIES[text].config | {"model_type": FAMILIES[text].model_type or text}
    torch.manual_seed(0)
    config = AutoConfig.for_model(composite, text_config=inner, vision_config=VISION[composite])
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    model = load(tmp_path)
    prove_isolation(model, device=CPU)
    prove_head(model, head_of(model), device=CPU)
    with torch.no_grad():
        ours = head_of(model).logits(hidden_states(model, pack(DOCUMENTS[0])))[6:25]
        whole.set_attn_implementation("eager")
        theirs = whole.eval()(input_ids=DOCUMENTS[0][2][None], use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    add_adapters(model, Adapter(rank=2, targets=["attention"]), seed=0)
    _, grads = step(model)
    assert grads and set(grads) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_nemotron_h_without_experts_is_a_dense_model(tmp_path: Path) -> None:
    """Its config writes a number of experts all the same."""
    model = load(save_family("nemotron_h", tmp_path, layers_block_type=["mamba", "attention", "mlp"]))
    prove_isolation(model, device=CPU)


class Leaky(nn.Module):
    """A causal mean over the whole row, boundaries or not."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        places = torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
        return hidden_states.cumsum(dim=1) / places, None


class Counting(nn.Module):
    """Keeps to itself but counts from the beginning of the row."""

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states * torch.arange(hidden_states.shape[1])[None, :, None], None


class Broken(nn.Module):
    """Cannot do without a mask."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **_: object) -> tuple[Tensor, None]:
        return hidden_states + attention_mask[:, 0], None  # type: ignore[index]


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (Leaky, "lets a document see the one packed before it"),
        (Counting, "other numbers than transformers' eager"),
        (Broken, "cannot run on a packed row: TypeError"),
    ],
)
def test_an_architecture_that_ignores_boundaries_is_refused_before_step_1(
    mixer: type[nn.Module], said: str, tmp_path: Path
) -> None:
    model = load(save_family("llama", tmp_path))
    model.model.layers[1].self_attn = mixer()
    with pytest.raises(ModelError, match=said) as refusal:
        prove_isolation(model, device=CPU)
    assert "docs/models.md" in str(refusal.value)


def test_each_choice_is_said_with_its_reason(tmp_path: Path) -> None:
    model = load(save_family("lfm2", tmp_path))
    assert describe(model, CPU) == ["1 x Lfm2ShortConv: one document at a time (cpu has no kernel with boundaries)"]
    convolution = model.model.layers[0].conv
    on_gpu = choose_mixing(convolution, torch.device("cuda"))
    assert on_gpu is not None and "causal_conv1d" in on_gpu.name + on_gpu.reason
