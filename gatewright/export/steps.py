"""Steps of an export, each done once: its record holds what it was made from and what it made, and is written last.

A step whose inputs are as they were and whose outputs lie where it put them is not done again, so an export that was
interrupted, or that gets one more file, goes on where it stands.
"""

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gatewright.spec.errors import RunFailed

Tick = Callable[[int, int], None]
Result = dict[str, Any]


class Steps:
    """Runs steps, with a progress bar each."""

    def __init__(self, folder: Path, *, console: Console) -> None:
        self.folder, self.console = folder, console
        folder.mkdir(parents=True, exist_ok=True)

    def run(
        self,
        name: str,
        words: str,
        inputs: Mapping[str, Any],
        outputs: Callable[[], Sequence[Path]],
        action: Callable[[Tick], Result],
    ) -> Result:
        """The result of a step, from its record or from `action`, which must leave every output.

        `outputs` says where they lie now: a file gets another name once it is proven.

        Raises RunFailed when the disk is full, with what was and what was not done.
        """
        record = self.folder / f"{name}.json"
        digest = fingerprint(inputs)
        if (known := _read(record)) and known["inputs"] == digest and known["outputs"] == _sizes(outputs()):
            self.console.print(f"[dim]{words}: done before[/dim]", highlight=False)
            result: Result = known["result"]
            return result
        record.unlink(missing_ok=True)
        try:
            with self._bar(words) as tick:
                result = action(tick)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise RunFailed(
                f"{words}: the disk is full ({error.filename or self.folder}); free some space and run the same "
                "command again: the steps before this one are kept"
            ) from error
        write_json(record, {"inputs": digest, "outputs": _sizes(outputs()), "result": result})
        return result

    @contextlib.contextmanager
    def _bar(self, words: str) -> Iterator[Tick]:
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(words, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


def fingerprint(values: Any) -> str:
    """sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Writes the file whole, or not at all."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _read(record: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.keys() >= {"inputs", "outputs", "result"} else None


def _sizes(outputs: Sequence[Path]) -> list[int]:
    """Bytes of each file; of a folder, of all it holds; -1 for what is not there."""
    return [_size(output) for output in outputs]


def _size(output: Path) -> int:
    if output.is_dir():
        return sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    return output.stat().st_size if output.is_file() else -1
