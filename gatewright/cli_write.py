"""Files that a verb writes because it was asked to: each is there whole or not at all."""

from pathlib import Path

from gatewright.spec.errors import UserError


def write_whole(path: Path, content: bytes, *, option: str) -> None:
    """Write a file beside its place, then move it there. Raises UserError that names the option it was asked by."""
    if path.is_dir():
        name = path / f"report.{option.removeprefix('--')}"
        raise UserError(f"{path} is a folder; {option} wants the file's own name, such as {name}")
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}; choose another {option}") from None
