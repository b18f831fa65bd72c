"""Shapes read from configs: counts by role of eight known models, linear modules, adapters, layer patterns."""

from typing import Any

import pytest

from gatewright.planner.architecture import read_shape
from gatewright.planner.catalogue import find_model, find_shape
from gatewright.planner.tensors_roles import role_of
from gatewright.spec.shape import ROLES, TARGET_ROLES

HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"

# Built on the meta device with transformers 5.24, counted by parameter name. The DeepSeek-V4 rows were built with the
# class's default layer pattern, which is not the published one.
BUILT: list[tuple[str, dict[str, Any], int, dict[str, int]]] = [
    (
        "Qwen3-8B",
        {},
        8190735360,
        {"embedding": 622329856, "attention": 1509958656, "dense_mlp": 5435817984, "norms": 299008, "head": 622329856},
    ),
    (
        "Qwen3-30B-A3B",
        {},
        30532122624,
        {
            "embedding": 311164928,
            "attention": 905981952,
            "router": 12582912,
            "routed_experts": 28991029248,
            "norms": 198656,
            "head": 311164928,
        },
    ),
    (
        "Qwen3-235B-A22B",
        {},
        235093634560,
        {
            "embedding": 622329856,
            "attention": 6702521856,
            "router": 49283072,
            "routed_experts": 227096395776,
            "norms": 774144,
            "head": 622329856,
        },
    ),
    (
        "Qwen3.5-4B",
        {},
        4205751296,
        {
            "embedding": 635699200,
            "attention": 293605376,
            "linear_attention": 1011356160,
            "dense_mlp": 2264924160,
            "norms": 166400,
        },
    ),
    (
        "Qwen3.6-35B-A3B",
        {},
        34660610688,
        {
            "embedding": 508559360,
            "attention": 272634880,
            "linear_attention": 1011553920,
            "router": 20971520 + 40 * 2048,
            "routed_experts": 32212254720,
            "shared_experts": 125911040 - 40 * 2048,
            "norms": 165888,
            "head": 508559360,
        },
    ),
    (
        "GLM-5.2",
        {},
        743377000704,
        {
            "embedding": 951582720,
            "attention": 13068542208,
            "dense_mlp": 3 * 3 * 6144 * 12288,
            "router": 797442048 - 3 * 3 * 6144 * 12288,
            "routed_experts": 724775731200,
            "shared_experts": 2831155200,
            "norms": 964608,
            "head": 951582720,
        },
    ),
    (
        "DeepSeek-V4-Flash",
        {"layer_types": [HEAVY] * 3 + [SPARSE, HEAVY] * 20},
        284325869015,
        {
            "embedding": 529530880,
            "attention": 5079956672,
            "router": 45088768,
            "routed_experts": 277025390592,
            "shared_experts": 1082130432,
            "norms": 87 * 4096,
            "residual": 34240791 - 87 * 4096,
            "head": 529530880,
        },
    ),
    (
        "DeepSeek-V4-Pro",
        {"layer_types": [HEAVY] * 3 + [SPARSE, HEAVY] * 29},
        1572973188067,
        {
            "embedding": 926679040,
            "attention": 19441111808,
            "router": 167903232,
            "routed_experts": 1547396186112,
            "shared_experts": 4029677568,
            "norms": 123 * 7168,
            "residual": 84951267 - 123 * 7168,
            "head": 926679040,
        },
    ),
]


@pytest.mark.parametrize(("name", "changes", "total", "roles"), BUILT, ids=[row[0] for row in BUILT])
def test_counts_of_the_built_models(name: str, changes: dict[str, Any], total: int, roles: dict[str, int]) -> None:
    shape = read_shape({**find_model(name).config, **changes})
    assert shape.parameters == total
    assert {role: count for role, count in shape.parameters_by_role().items() if role != "mtp"} == roles


def test_groups_add_up_and_linears_lie_within_them() -> None:
    for name in ("Qwen3-8B", "gpt-oss-20b", "Llama-4-Scout-17B-16E", "DeepSeek-V4-Flash", "Nemotron-3-Nano-30B-A3B"):
        shape = find_shape(name)
        assert sum(shape.parameters_by_role().values()) == shape.checkpoint_parameters
        inside = sum(shape.layer_parameters(layer) for layer in range(len(shape.layers)))
        outside = sum(group.parameters for group in shape.groups if group.layer is None)
        assert inside + outside == shape.parameters
        for group in shape.groups:
            assert 0 <= sum(linear.parameters for linear in group.linears) <= group.parameters


def test_adapter_of_rank_32_is_small_on_queries_and_values_and_huge_on_experts() -> None:
    shape = find_shape("Qwen3-235B-A22B")
    small = shape.lora_parameters(32, roles=["attention"], names=["q_proj", "v_proj"])
    huge = shape.lora_parameters(32, roles=[*TARGET_ROLES["attention"], *TARGET_ROLES["experts"]])
    assert small == 50_823_168
    assert huge == 5_029_953_536
    assert small * 12 == pytest.approx(610e6, rel=0.001)  # fp32 master, m and v
    assert huge * 12 == pytest.approx(60.4e9, rel=0.001)


def test_adapters_never_touch_a_router_that_is_no_module() -> None:
    assert find_shape("Qwen3-30B-A3B").lora_parameters(8, roles=["router"]) == 0
    assert find_shape("Llama-4-Scout-17B-16E").lora_parameters(8, roles=["router"]) == 48 * 8 * (5120 + 16)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 3.35),
        ("Qwen3-235B-A22B", 22.19),
        ("Mixtral-8x7B-v0.1", 12.88),
        ("DeepSeek-V3", 37.55),
        ("gpt-oss-120b", 5.71),
    ],
)
def test_active_parameters(name: str, billions: float) -> None:
    assert find_shape(name).active_parameters / 1e9 == pytest.approx(billions, abs=0.005)


def test_flops_of_linear_modules_follow_the_active_experts() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    roles = [role for role in ROLES if role not in ("embedding", "norms", "mtp")]
    flops = sum(linear.flops_per_token for _, linear in shape.linears(roles))
    embedding = shape.parameters_by_role()["embedding"]
    norms = shape.parameters_by_role()["norms"] + 48 * 2 * 128
    assert flops == 2 * (shape.active_parameters - embedding - norms)


def test_attention_kinds_of_each_family() -> None:
    kinds = {
        name: [layer.attention.kind for layer in find_shape(name).layers if layer.attention]
        for name in ("gpt-oss-20b", "gemma-3-1b-pt", "Llama-4-Scout-17B-16E", "Qwen3.6-35B-A3B", "DeepSeek-V4-Flash")
    }
    assert kinds["gpt-oss-20b"] == ["sliding", "full"] * 12
    assert kinds["gemma-3-1b-pt"] == [("sliding", "full")[layer % 6 == 5] for layer in range(26)]
    assert kinds["Llama-4-Scout-17B-16E"] == [("chunked", "full")[layer % 4 == 3] for layer in range(48)]
    assert kinds["Qwen3.6-35B-A3B"] == ["linear", "linear", "linear", "full"] * 10
    assert kinds["DeepSeek-V4-Flash"] == ["sliding"] * 2 + ["compressed"] * 41


def test_cache_and_state_sizes() -> None:
    latent = find_shape("DeepSeek-V3").layers[0].attention
    grouped = find_shape("Qwen3-8B").layers[0].attention
    recurrent = find_shape("Qwen3.6-35B-A3B").layers[0].attention
    assert latent and latent.cache_elements_per_token == 512 + 64
    assert grouped and grouped.cache_elements_per_token == 2 * 8 * 128
    assert recurrent and (recurrent.cache_elements_per_token, recurrent.state_elements) == (0, 32 * 128 * 128)


def test_mtp_layers_are_counted_apart() -> None:
    shape = find_shape("GLM-4.5-Air")
    assert shape.mtp_parameters > 0
    assert shape.checkpoint_parameters == shape.parameters + shape.mtp_parameters
    assert {group.layer for group in shape.groups if group.role == "mtp"} == {len(shape.layers)}


def test_expert_count_is_read_under_every_spelling() -> None:
    base = {key: value for key, value in find_model("Qwen3-30B-A3B").config.items() if key != "num_experts"}
    shapes = [read_shape({**base, key: 64}) for key in ("num_experts", "num_local_experts", "n_routed_experts")]
    assert {shape.experts for shape in shapes} == {64}
    assert read_shape(base).assumed == ("num_experts=128",)


def test_null_is_not_a_gap() -> None:
    """DeepSeek-V2-Lite says q_lora_rank null; the family's default is 1536."""
    attention = find_shape("DeepSeek-V2-Lite").layers[0].attention
    assert attention and attention.q_rank is None


def test_multimodal_configs_give_their_language_model() -> None:
    shape = find_shape("gemma-3-27b-pt")
    assert shape.left_out == ("vision_config",)
    assert (shape.family, shape.tied, shape.dtype) == ("gemma3_text", True, "bfloat16")


def test_tied_head_is_counted_once() -> None:
    config = dict(find_model("Llama-3.2-1B").config)
    tied, untied = read_shape(config), read_shape({**config, "tie_word_embeddings": False})
    assert untied.parameters - tied.parameters == 128256 * 2048
    assert "head" not in tied.parameters_by_role()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.layers.3.mlp.experts.7.gate_proj.weight_scale_inv", "routed_experts"),
        ("layers.3.ffn.experts.12.w1.scale", "routed_experts"),
        ("layers.3.ffn.shared_experts.w2.weight", "shared_experts"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "router"),
        ("layers.2.ffn.gate.tid2eid", "router"),
        ("layers.60.attn.indexer.compressor.wkv.weight", "attention"),
        ("layers.60.hc_attn_fn", "residual"),
        ("mtp.0.ffn.experts.3.w1.weight", "mtp"),
        ("model.layers.61.eh_proj.weight", "mtp"),
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "linear_attention"),
        ("backbone.layers.5.mixer.in_proj.weight", "linear_attention"),
        ("backbone.layers.6.mixer.experts.3.up_proj.weight", "routed_experts"),
        ("embed.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "attention"),
        ("model.layers.0.mlp.down_proj.weight", "dense_mlp"),
    ],
)
def test_roles_of_published_tensor_names(name: str, role: str) -> None:
    assert role_of(name) == role
