"""Bytes of weights: exact from safetensors headers, by formula for published formats, and the figures of the facts."""

import json
from pathlib import Path

import pytest

from gatewright.planner.catalogue import find_shape
from gatewright.planner.weights import (
    FORMATS,
    checkpoint_bytes,
    four_bit_readings,
    native_format,
    read_weights,
    total_bytes,
)
from gatewright.spec.errors import ModelError

GB = 10**9
Header = dict[str, tuple[str, list[int], int]]


def write_file(path: Path, tensors: Header) -> Path:
    """A safetensors file of (dtype, shape, bytes) whose data is a hole."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}  # type: ignore[dict-item]
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    return path


MIXED: Header = {
    "embed.weight": ("BF16", [100, 32], 6400),
    "layers.0.attn.wq_a.weight": ("F8_E4M3", [16, 32], 512),
    "layers.0.attn.wq_a.scale": ("F8_E8M0", [1, 1], 1),
    "layers.0.ffn.experts.0.w1.weight": ("I8", [16, 16], 256),
    "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", [16, 1], 16),
    "layers.0.ffn.gate.tid2eid": ("I64", [100, 2], 1600),
    "layers.0.hc_attn_fn": ("F32", [8, 8], 256),
    "layers.0.mlp.gate_proj.weight": ("F4", [16, 32], 256),
    "layers.1.attn.wq_a.weight": ("F8_E4M3", [16, 32], 512),
}


def test_bytes_by_dtype_and_role(tmp_path: Path) -> None:
    found = read_weights(write_file(tmp_path / "model.safetensors", MIXED), layers=1)
    assert (found.files, found.tensors, found.bytes) == (1, 9, 6400 + 512 + 1 + 256 + 16 + 1600 + 256 + 256 + 512)
    assert found.bytes_by_dtype == {
        "BF16": 6400,
        "I64": 1600,
        "F8_E4M3": 1024,
        "I8": 256,
        "F32": 256,
        "F4": 256,
        "F8_E8M0": 17,
    }
    assert found.bytes_by_role == {
        "embedding": 6400,
        "attention": 513,
        "dense_mlp": 256,
        "router": 1600,
        "routed_experts": 272,
        "residual": 256,
        "mtp": 512,
    }


def test_folder_index_and_single_file_agree(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"lm_head.weight": ("BF16", [8, 8], 128)})
    write_file(tmp_path / "b.safetensors", {"model.norm.weight": ("F32", [8], 32)})
    assert read_weights(tmp_path).bytes == 160
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    assert read_weights(tmp_path).bytes == read_weights(index).bytes == 128


def test_headers_of_a_huge_file_are_read_at_once(tmp_path: Path) -> None:
    """No tensor is read: the file is a hole of 4 TiB."""
    size = 2**42
    found = read_weights(write_file(tmp_path / "m.safetensors", {"experts.w": ("U8", [size], size)}))
    assert found.bytes == size


def test_damaged_files(tmp_path: Path) -> None:
    path = write_file(tmp_path / "model.safetensors", MIXED)
    whole = path.read_bytes()
    for cut in (0, 5, 8, 60):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="cut off or is no safetensors file"):
            read_weights(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="is incomplete: its header promises"):
        read_weights(path)
    path.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ModelError, match="cut off"):
        read_weights(path)
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(ModelError, match="header that is not JSON"):
        read_weights(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [4], "data_offsets": [0, 9]},
        {"dtype": "BF16", "shape": [-4], "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [4], "data_offsets": [8, 0]},
        {"dtype": "BF16", "shape": "4", "data_offsets": [0, 8]},
        {"dtype": "BF16", "shape": [4]},
        "BF16",
    ],
)
def test_damaged_entries(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"model.norm.weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=r"header entry of model\.norm\.weight is damaged"):
        read_weights(path)


def test_index_mistakes(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}))
    with pytest.raises(ModelError, match=r"2 of 2 files are missing, first x\.safetensors"):
        read_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="points outside its own folder"):
        read_weights(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="no weight_map"):
        read_weights(tmp_path)


def test_folder_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no safetensors file"):
        read_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="pickled"):
        read_weights(tmp_path)


# The figures of the facts, decimal GB


def test_qwen3_235b_at_fp8_is_235_gb() -> None:
    shape = find_shape("Qwen3-235B-A22B")
    assert shape.parameters / GB == pytest.approx(235, abs=0.1)  # one byte a parameter
    # With embeddings and head in bf16 and a scale a block, as published FP8 files have them.
    assert total_bytes(shape, "fp8") / GB == pytest.approx(235, rel=0.01)


def test_v4_checkpoints_are_as_large_as_published() -> None:
    """V4-Pro: 805.32 GiB of tensors in its listing; V4-Flash: 159.6 GB in its index."""
    pro, flash = find_shape("DeepSeek-V4-Pro"), find_shape("DeepSeek-V4-Flash")
    assert native_format(pro) == native_format(flash) == "fp8-mxfp4"
    assert total_bytes(pro, "fp8-mxfp4", mtp=True) == pytest.approx(805.32 * 2**30, rel=1e-4)
    assert round(total_bytes(pro, "fp8-mxfp4", mtp=True) / GB) == 865
    assert round(total_bytes(flash, "fp8-mxfp4", mtp=True) / GB, 1) == 159.6


def test_glm_52_at_bare_four_bits_is_375_gb() -> None:
    shape = find_shape("GLM-5.2")
    assert shape.parameters / 2 / GB == pytest.approx(375, rel=0.01)
    assert shape.checkpoint_parameters / 2 / GB == pytest.approx(375, rel=0.01)


def test_three_readings_of_v4_pro_in_four_bits_all_exceed_its_own_checkpoint() -> None:
    shape = find_shape("DeepSeek-V4-Pro")
    bare, nf4, thumb, plain = (size / GB for size in four_bit_readings(shape).values())
    assert nf4 == pytest.approx(890, rel=0.01)
    assert thumb == pytest.approx(960, rel=0.01)
    assert plain == pytest.approx(3100, rel=0.01)
    native = total_bytes(shape, "fp8-mxfp4", mtp=True) / GB
    assert bare < native < nf4 < thumb < plain


def test_gpt_oss_checkpoint() -> None:
    """openai/gpt-oss-20b: 13.76 GB of safetensors."""
    shape = find_shape("gpt-oss-20b")
    assert total_bytes(shape, native_format(shape)) / GB == pytest.approx(13.76, rel=0.005)


def test_bytes_by_role_are_whole_and_add_up() -> None:
    shape = find_shape("Qwen3-8B")
    by_role = checkpoint_bytes(shape, storage=FORMATS["bf16"])
    assert sum(by_role.values()) == 2 * shape.parameters
    assert by_role["embedding"] == 2 * 622329856
