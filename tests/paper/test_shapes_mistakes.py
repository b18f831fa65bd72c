"""Configs and headers that are wrong: one sentence that says what, where and what to do; never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest

from gatewright.planner.architecture import read_shape
from gatewright.planner.catalogue import find_model, find_shape
from gatewright.spec.errors import ModelError, UserError

LLAMA: dict[str, Any] = dict(find_model("Llama-3.2-1B").config)
GLM: dict[str, Any] = dict(find_model("GLM-5.2").config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, wanted 1 to"),
        ({"hidden_size": -4096}, "hidden_size is -4096"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', wanted an integer"),
        ({"hidden_size": True}, "wanted an integer"),
        ({"hidden_size": 2048.5}, "wanted an integer"),
        ({"hidden_size": float("nan")}, "wanted an integer"),
        ({"hidden_size": float("inf")}, "wanted an integer"),
        ({"hidden_size": 10**30}, "wanted 1 to 1,099,511,627,776"),
        ({"num_hidden_layers": 10**9}, "wanted 1 to 10,000"),
        ({"num_hidden_layers": [16]}, "wanted an integer"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is no multiple of num_key_value_heads 5"),
        ({"num_attention_heads": 30, "num_key_value_heads": 6, "head_dim": None}, "no multiple of num_attention_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', wanted true or false"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": 7}, "has no model_type"),
    ],
)
def test_impossible_values(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape({**LLAMA, **changes})
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 512}, "num_experts_per_tok is 512, more than the 256 experts"),
        ({"n_routed_experts": 0}, "num_experts is 0"),
        ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types has 5 entries, wanted one for each of 78 layers"),
        ({"mlp_layer_types": ["wide"] * 78}, "mlp_layer_types holds 'wide', wanted one of dense, sparse"),
        ({"kv_lora_rank": None}, "has no kv_lora_rank"),
    ],
)
def test_impossible_mixtures(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match="config") as caught:
        read_shape({**GLM, **changes})
    assert words in str(caught.value)


def test_unknown_family_names_the_nearest_and_offers_the_rehearsal() -> None:
    with pytest.raises(ModelError) as caught:
        read_shape({**LLAMA, "model_type": "qwen3_moes"})
    assert "qwen3_moe" in str(caught.value)
    assert "--simulate" in str(caught.value)


JUNK: list[Any] = [
    *(None, True, 0, -1, 3, 10**12, 10**400, 1.5, float("nan"), float("inf")),
    *("", "x", "M" * 200, [], [1], ["x"], [[1]] * 200, ["full_attention"] * 200, {}, {"a": 1}),
]


@pytest.mark.parametrize(
    "name", ["DeepSeek-V4-Flash", "Kimi-Linear-48B-A3B-Base", "GLM-5.2", "Nemotron-3-Nano-30B-A3B", "gemma-3-4b-pt"]
)
def test_any_value_of_any_key_gives_a_shape_or_a_sentence(name: str) -> None:
    config = find_model(name).config
    for outer, value in config.items():
        inner = value if isinstance(value, dict) else {}
        for junk in JUNK:
            for changed in ({outer: junk}, *({outer: {**inner, key: junk}} for key in inner)):
                try:
                    shape = read_shape({**config, **changed})
                except ModelError as error:
                    assert len(str(error)) < 800
                else:
                    assert shape.parameters > 0
                    assert min(group.parameters for group in shape.groups) >= 0


@pytest.mark.parametrize("cut", [0, 1, 40, 300])
def test_config_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM)[:cut])
    with pytest.raises(ModelError, match="is not JSON, or is cut off") as caught:
        read_shape(path)
    assert str(path) in str(caught.value)


def test_config_that_is_no_object_or_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[1, 2]")
    with pytest.raises(ModelError, match="holds a JSON list, wanted an object"):
        read_shape(path)
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ModelError, match="is not JSON"):
        read_shape(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ModelError, match="is not JSON"):
        read_shape(path)


def test_config_of_ten_gigabytes_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as stream:
        stream.truncate(10 * 10**9)  # a sparse file: no byte is written
    with pytest.raises(ModelError, match=r"holds 10,000,000,000 bytes; a config\.json has at most"):
        read_shape(path)


def test_missing_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        read_shape(tmp_path)
    with pytest.raises(ModelError, match="No such file"):
        read_shape(tmp_path / "config.json")
    with pytest.raises(UserError, match="Nearest in the catalogue: Qwen3-30B-A3B"):
        find_shape("Qwen3-30B-A3")


def test_folder_and_file_and_dict_agree(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM))
    assert read_shape(tmp_path).groups == read_shape(path).groups == read_shape(GLM).groups
    assert find_shape(str(tmp_path)).name == tmp_path.name
