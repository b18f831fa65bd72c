"""Checkpoints are complete or invisible: whatever is broken, the newest sound one is found and nothing else is lost."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch

from gatewright.spec.errors import CheckpointError
from gatewright.train import checkpoint
from gatewright.train.host import HostCopy
from gatewright.train.save import Saving, Write, save


def write(text: str):  # type: ignore[no-untyped-def]
    def into(folder: Path) -> list[Path]:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "weights").write_text(text)
        (folder / "state").write_text(text * 2)
        return [folder / "state", folder / "adapter" / "weights"]

    return into


def three(root: Path) -> list[checkpoint.Checkpoint]:
    return [save(root, step=step, write=write(f"weights of {step}")) for step in (10, 20, 30)]


def test_the_newest_is_found(tmp_path: Path) -> None:
    saved = three(tmp_path)
    assert checkpoint.newest_sound(tmp_path, warn=pytest.fail) == saved[-1]
    assert saved[-1].bytes == 3 * len("weights of 30")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "adapter" / "weights").write_text("weights oF 30"), "does not have the hash"),
        (lambda path: (path / "state").write_text("short"), "has 5 bytes, the manifest says 26"),
        (lambda path: (path / "state").unlink(), "state is missing"),
        (lambda path: (path / "manifest.json").write_text('{"format": 99, "step": 30, "files": []}'), "format 99"),
    ],
)
def test_a_damaged_one_is_passed_over_and_said(tmp_path: Path, damage, reason: str) -> None:  # type: ignore[no-untyped-def]
    saved = three(tmp_path)
    damage(saved[-1].path)
    said: list[str] = []
    assert checkpoint.newest_sound(tmp_path, warn=said.append) == saved[1]
    assert len(said) == 1 and reason in said[0]


def test_one_without_manifest_does_not_exist(tmp_path: Path) -> None:
    saved = three(tmp_path)
    (saved[-1].path / "manifest.json").write_text('{"format": 1, "st')
    assert [c.step for c in checkpoint.complete(tmp_path)] == [10, 20]


def test_a_half_written_one_is_swept_away(tmp_path: Path) -> None:
    saved = three(tmp_path)
    shutil.copytree(saved[0].path, tmp_path / ".partial-step-00000040")
    assert checkpoint.newest_sound(tmp_path, warn=pytest.fail) == saved[-1]
    assert not (tmp_path / ".partial-step-00000040").exists()


def test_a_failed_save_leaves_the_old_ones_and_no_trace(tmp_path: Path) -> None:
    saved = three(tmp_path)

    def full(folder: Path) -> list[Path]:
        (folder / "state").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-00000040: not saved \(No space left on device\); .* GiB are free"):
        save(tmp_path, step=40, write=full)
    assert checkpoint.newest_sound(tmp_path, warn=pytest.fail) == saved[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    saved = three(tmp_path)
    checkpoint.prune(tmp_path, keep=1, spare=[saved[0].path])
    assert [c.step for c in checkpoint.complete(tmp_path)] == [10, 30]
    checkpoint.prune(tmp_path, keep=1, spare=[])
    assert [c.step for c in checkpoint.complete(tmp_path)] == [30]


def test_the_manifest_names_every_file(tmp_path: Path) -> None:
    manifest = json.loads((three(tmp_path)[0].path / "manifest.json").read_text())
    assert [f["name"] for f in manifest["files"]] == ["adapter/weights", "state"]
    assert checkpoint.verify(tmp_path / "step-00000010") is None


def slow(go: threading.Event) -> Write:
    def into(folder: Path) -> list[Path]:
        assert go.wait(10)
        return write("slowly")(folder)

    return into


def test_a_save_in_the_background_is_complete_only_when_all_is_written(tmp_path: Path) -> None:
    saved, go, done = three(tmp_path), threading.Event(), []
    saving = Saving(tmp_path, step=40, write=slow(go), then=lambda: done.append(40))
    assert saving.poll() is None and checkpoint.complete(tmp_path)[-1] == saved[-1] and not done
    go.set()
    assert saving.wait() == checkpoint.newest_sound(tmp_path, warn=pytest.fail) and done == [40]
    assert 0 < saving.copy_s < saving.stall_s and saving.write_s > 0


def test_a_save_that_was_given_up_gets_no_name(tmp_path: Path) -> None:
    saved, go = three(tmp_path), threading.Event()
    saving = Saving(tmp_path, step=40, write=slow(go))
    saving.abandon()
    go.set()
    with pytest.raises(CheckpointError, match="given up"):
        saving.wait()
    assert checkpoint.newest_sound(tmp_path, warn=pytest.fail) == saved[-1]


def test_a_mistake_in_the_thread_is_not_lost(tmp_path: Path) -> None:
    def wrong(folder: Path) -> list[Path]:
        raise KeyError("no such tensor")

    with pytest.raises(CheckpointError, match="KeyError: 'no such tensor'"):
        save(tmp_path, step=40, write=wrong)


def test_the_host_copy_is_kept_and_untouched_by_what_happens_to_the_tensor() -> None:
    host, weight = HostCopy(), torch.arange(6.0).view(2, 3).T
    copy = host.take("weight", weight)
    weight += 1
    assert copy.tolist() == [[0, 3], [1, 4], [2, 5]] and copy.is_contiguous()
    assert host.take("weight", weight).data_ptr() == copy.data_ptr() and torch.equal(copy, weight)
    assert host.take("weight", weight.half()).dtype == torch.float16
