"""Logs of any form are read: big, packed, coloured, interleaved, broken, of another encoding, or none at all."""

import gzip
import io
import os
import tracemalloc
from pathlib import Path

import pytest

from gatewright.doctor.diagnosis import Diagnosis, diagnose
from gatewright.doctor.reader import MAX_WATCHED
from gatewright.doctor.scan import Scanner, scan_log
from gatewright.doctor.source import MAX_FILES, LogError

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 40.00 GiB of which "
    "1.00 GiB is free. Of the allocated memory 30.00 GiB is allocated by "
    "PyTorch, and 8.00 GiB is reserved by PyTorch but "
    "unallocated."
)


def doctor(data: bytes) -> Diagnosis:
    return diagnose([], stdin=io.BytesIO(data))


def line_of(found: Diagnosis) -> int:
    assert found.root is not None
    return found.root.places[0].line


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 4096, 10**6])
def test_the_answer_does_not_depend_on_where_chunks_end(chunk: int) -> None:
    text = f"a\r\n\x1b[31mb\x1b[0m\n 1%|#|\r 2%|##|\r 3%|###|\nc\r\n{OOM}\r\nd\n".encode()
    scan = scan_log((text[i : i + chunk] for i in range(0, len(text), chunk)), file="x")
    assert [s.place.line for s in scan.lives[-1].sightings["GW511"]] == [5]
    assert scan.lines == 6


def test_a_colour_inside_a_word_does_not_hide_it() -> None:
    assert doctor(b"Disk \x1b[1mquota\x1b[0m exceeded\n").root is not None


def test_context_reaches_over_the_border_of_chunks() -> None:
    """The traceback is in one chunk, its last line in the next."""
    trace = b'Traceback (most recent call last):\n  File "/venv/trainer.py", line 1, in evaluation_loop\n    step()\n'
    scan = scan_log([b"x\n" * 500 + trace, OOM.encode() + b"\n"], file="x")
    sighting = scan.lives[-1].sightings["GW511"][0]
    assert sighting.place.line == 504
    assert "evaluation_loop" in "\n".join(sighting.before)


def test_the_last_line_needs_no_newline() -> None:
    assert line_of(doctor(b"a\nb\n" + OOM.encode())) == 3


def test_a_gzip_file_is_unpacked_and_one_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    packed = gzip.compress(b"line\n" * 200_000 + OOM.encode() + b"\n" + os.urandom(4000).hex().encode() * 40)
    (tmp_path / "a.log.gz").write_bytes(packed)
    assert line_of(diagnose([tmp_path / "a.log.gz"])) == 200_001
    (tmp_path / "b.log.gz").write_bytes(packed[: len(packed) // 2])
    assert line_of(diagnose([tmp_path / "b.log.gz"])) == 200_001


def test_utf_16_is_read() -> None:
    assert line_of(doctor(f"a\n{OOM}\n".encode("utf-16"))) == 2


def test_bytes_that_are_no_utf_8_do_not_matter() -> None:
    assert line_of(doctor(b"\xff\xfe\xfa caf\xe9 text\n".replace(b"\xff\xfe", b"\xe9") + OOM.encode())) == 2


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "empty"), (os.urandom(5000), "binary"), (b"\x7fELF\x00\x00\x01" * 99, "binary")]
)
def test_what_is_no_log_is_refused_in_one_sentence(data: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_bytes(data)
    with pytest.raises(LogError, match=says):
        diagnose([tmp_path / "x.log"])


def test_a_path_that_is_not_there_and_a_folder_without_logs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="No such file"):
        diagnose([tmp_path / "none.log"])
    with pytest.raises(LogError, match="no log in it"):
        diagnose([tmp_path])
    with pytest.raises(LogError, match="not a path"):
        diagnose([Path("a\x00b")])


def test_a_folder_of_very_many_files_is_read_in_part_and_says_so(tmp_path: Path) -> None:
    for number in range(MAX_FILES + 40):
        (tmp_path / f"rank_{number}.log").write_bytes(b"fine\n")
        os.utime(tmp_path / f"rank_{number}.log", (1_000_000 + number,) * 2)
    (tmp_path / f"rank_{MAX_FILES + 39}.log").write_bytes(OOM.encode())
    found = diagnose([tmp_path])
    assert len(found.files) == MAX_FILES
    assert found.root is not None and found.root.places[0].rank == MAX_FILES + 39
    assert "newest" in found.notes[0]


def test_a_binary_file_among_logs_is_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(OOM)
    (tmp_path / "b.log").write_bytes(bytes(range(9)) * 500)
    found = diagnose([tmp_path])
    assert len(found.files) == 1 and "binary" in found.notes[0]


def test_a_line_without_end_is_read_in_pieces() -> None:
    assert line_of(doctor(b"x" * 9_000_000 + b"\n" + OOM.encode())) == 2


@pytest.mark.parametrize("filling", [b"x" * 2**20, b"\0" * 2**20, b"x" * (2**20 - 1) + b"\n"])
def test_what_is_kept_of_long_lines_is_bounded(filling: bytes) -> None:
    scanner = Scanner("x")
    tracemalloc.start()
    for _ in range(64):
        scanner.feed(filling)
    scanner.feed(b"\n" + OOM.encode() + b"\n")
    found = scanner.finish().lives[-1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "GW511" in found.sightings
    assert peak < 400 * 2**20


def test_what_is_kept_is_bounded() -> None:
    """A hundred thousand different errors, then the one that counts."""
    scanner = Scanner("x")
    letters = [bytes([97 + n // 676 % 26, 97 + n // 26 % 26, 97 + n % 26]) for n in range(17_576)]
    for part in range(6):
        scanner.feed(b"".join(b"SomeError: %s failed %s\n" % (word, letters[part]) for word in letters))
    scanner.feed(OOM.encode() + b"\n" + b"fine\n" * 200)
    assert len(scanner._reader._watched) <= MAX_WATCHED
    scan = scanner.finish()
    assert scan.lives[-1].sightings["GW511"][0].place.line == 6 * 17_576 + 1
    assert len(scan.lives[-1].suspicious) <= 64


def test_ranks_and_nodes_are_read_in_the_forms_that_launchers_use() -> None:
    forms = {
        f"[rank3]: {OOM}": (3, None),
        f"5: {OOM}": (5, None),
        f"[default7]:{OOM}": (7, None),
        "srun: error: nid005031: task 12: Exited with exit code 1": (12, "nid005031"),
        ("slurmstepd: error: *** JOB 77 ON nid000012 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"): (
            None,
            "nid000012",
        ),
    }
    for text, who in forms.items():
        root = doctor(text.encode()).root
        assert root is not None and (root.places[0].rank, root.places[0].node) == who, text
