"""The planner's closed form against the rehearsal of the trainer's own step: peak bytes within 5 %."""

import pytest
from transformers import LlamaConfig, MixtralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from gatewright.planner.architecture import read_shape
from gatewright.planner.ask import ask
from gatewright.planner.catalogue import find_model
from gatewright.planner.job import Checkpointing
from gatewright.planner.memory import estimate_memory
from gatewright.probe.rehearsal import config_of, rehearse
from gatewright.spec.run import Run

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, head_dim=64),
    "mixtral": MixtralConfig(**SIZES | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1408}),
}
PLANNED: dict[str, Checkpointing] = {"none": "none", "selective": "alternate", "full": "full"}
"""The run file's words for recomputation in the planner's."""


def peaks(config: PretrainedConfig, targets: list[str] | None, checkpointing: str, lengths: list[int]) -> list[int]:
    """Allocated bytes at the fullest moment: (planned, rehearsed), margins left out."""
    run = Run.model_validate(
        {
            "run": "rehearsed",
            "model": {"path": "model", "dtype": "bfloat16"},
            "method": {"adapter": {"rank": 16, "targets": targets}} if targets else {},
            "data": {"train": "none.jsonl"},
            "train": {"tokens_per_step": 100, "steps": 1, "lr": 1e-3, "checkpointing": checkpointing},
        }
    )
    question = ask(
        read_shape(config.to_dict(), name="model"),
        gpu="h200",
        method="lora" if targets else "full",
        rank=16,
        targets=targets or ("attention",),
        storage="bf16",
        tokens=sum(lengths),
        document_tokens=max(lengths),
        checkpointing=PLANNED[checkpointing],
        loss_chunk_tokens=run.train.loss_chunk_tokens,
    )
    return [estimate_memory(question.job).peak.bytes, rehearse(run, lengths=lengths, config=config).peak.bytes]


@pytest.mark.parametrize(
    ("kind", "targets", "checkpointing"),
    [
        ("llama", ["attention"], "selective"),
        ("llama", ["attention", "mlp"], "full"),
        ("llama", None, "none"),
        ("qwen3", ["mlp"], "full"),
        ("qwen3", None, "selective"),
        ("qwen3_moe", ["attention"], "full"),
        ("qwen3_moe", ["attention", "experts"], "none"),
        ("qwen3_moe", ["attention", "experts"], "selective"),
        ("qwen3_moe", None, "full"),
        ("mixtral", ["attention"], "none"),
        ("mixtral", ["attention", "experts"], "full"),
        ("mixtral", None, "none"),
    ],
)
def test_small_models(kind: str, targets: list[str] | None, checkpointing: str) -> None:
    planned, rehearsed = peaks(CONFIGS[kind], targets, checkpointing, [2048, 2048])
    assert planned == pytest.approx(rehearsed, rel=0.05)


def test_a_catalogue_model_of_48_layers() -> None:
    """What the weights take is known; so it is what comes on top of them that must agree."""
    entry = find_model("Qwen3-30B-A3B")
    planned, rehearsed = peaks(config_of(entry.config), ["attention", "experts"], "none", [8192])
    weights = 2 * entry.shape().parameters
    assert planned - weights == pytest.approx(rehearsed - weights, rel=0.05)
