"""The routing record: the same after a write and a read, and refused in words when it is damaged or does not add up."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gatewright.router.blocks import RoutingRecord, read_record, write_record
from gatewright.spec.errors import DataError


@pytest.fixture
def record() -> RoutingRecord:
    """Documents 2 and 7: two whole blocks and 3 tokens, one whole block; 2 layers of 4 experts, top-2."""
    draw = np.random.default_rng(0)
    tokens = np.array([8, 8, 3, 8])
    counts = np.stack([draw.multinomial(2 * t, [0.25] * 4, size=2) for t in tokens])
    return RoutingRecord(
        document=np.array([2, 2, 2, 7]), block=np.array([0, 1, 2, 0]), tokens=tokens, counts=counts,
        layers=(1, 3), top_k=2, block_tokens=8,
    )  # fmt: skip


def assert_same(a: RoutingRecord, b: RoutingRecord) -> None:
    for name in ("document", "block", "tokens", "counts"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert (a.layers, a.top_k, a.block_tokens) == (b.layers, b.top_k, b.block_tokens)


def test_a_record_comes_back_as_it_was(record: RoutingRecord, tmp_path: Path) -> None:
    write_record(record, tmp_path / "new" / "routing.npz")
    assert_same(read_record(tmp_path / "new" / "routing.npz"), record)
    assert os.listdir(tmp_path / "new") == ["routing.npz"]


def test_its_views(record: RoutingRecord) -> None:
    assert (record.documents, record.experts) == (2, 4)
    assert record.loads().sum(axis=1).tolist() == [54, 54]
    assert [len(counts) for counts in record.whole_blocks()] == [2, 1]
    assert np.array_equal(record.whole_blocks()[1][0], record.counts[3])
    assert record.only(np.array([7])).counts.tolist() == record.counts[3:].tolist()
    assert [len(counts) for counts in record.only(np.array([7])).whole_blocks()] == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block": np.array([0, 2, 3, 0])}, "blocks are not in order"),
        ({"document": np.array([7, 7, 7, 2])}, "blocks are not in order"),
        ({"document": np.array([2, 2, 2, 2])}, "blocks are not in order"),
        ({"tokens": np.array([8, 8, 9, 8])}, "more than 8 tokens"),
        ({"tokens": np.array([8, 8, 2, 8])}, "row 2 has 6 assignments in a layer, its tokens make 4"),
        ({"top_k": 3}, "row 0 has 16 assignments in a layer, its tokens make 24"),
        ({"layers": (1, 2, 3)}, "layers has shape"),
        ({"document": np.array([2, 2, 7])}, "document has shape"),
    ],
)
def test_what_does_not_add_up_is_refused(
    record: RoutingRecord, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    write_record(replace(record, **changes), tmp_path / "r.npz")
    with pytest.raises(DataError, match=words) as caught:
        read_record(tmp_path / "r.npz")
    assert "r.npz" in str(caught.value)
    assert "measure again" in str(caught.value)


def test_what_is_no_record_is_refused(record: RoutingRecord, tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    with pytest.raises(DataError, match="no such file; `gatewright router measure"):
        read_record(path)
    for content in (b"", b"not a zip", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a readable routing record"):
            read_record(path)
    write_record(record, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="not a readable routing record"):
        read_record(path)
    np.savez(path, counts=np.zeros(3))
    with pytest.raises(DataError, match="it lacks block, block_tokens, document"):
        read_record(path)
    np.savez(path, counts=np.array([{}], dtype=object))
    with pytest.raises(DataError, match="not a readable routing record"):
        read_record(path)
    with pytest.raises(DataError, match="not a readable routing record"):
        read_record(tmp_path)


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(record: RoutingRecord, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be made"):
        write_record(record, tmp_path / "file" / "routing.npz")
    (tmp_path / "routing.npz").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_record(record, tmp_path / "routing.npz")
    assert sorted(os.listdir(tmp_path)) == ["file", "routing.npz"]
