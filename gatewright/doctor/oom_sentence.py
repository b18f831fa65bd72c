"""PyTorch's out-of-memory sentence, in every wording from 1.0 to 2.15 on CUDA, HIP and XPU, read into bytes.

What the numbers mean: PyTorch prints them after it gave its wholly unused blocks back to the device, so what is
reserved but unallocated lies in segments that are partly in use.
"""

import re
from dataclasses import dataclass

_UNIT = {
    "bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "EiB": 2**60,
    "KB": 2**10, "MB": 2**20, "GB": 2**30,
}  # fmt: skip
_SIZE = r"(\d{1,15}(?:\.\d{1,9})?\s*(?:bytes|[KMGTPE]iB|[KMG]B|B)\b)"
_NO_READING = 2**62
"""NVML or the driver answered -1: printed as 17179869184.00 GiB."""
_EXABYTE = 2**60

START = re.compile(
    r"(?P<backend>CUDA|HIP|XPU) out of memory[.,]?\s+Tried to allocate\s+(?:more than 1EB|" + _SIZE + ")"
)
_OLD = re.compile(
    rf"\(GPU (\d+); {_SIZE} total capacity; {_SIZE} already allocated; {_SIZE} free; {_SIZE} (reserved in total|cached)"
)
_NEW = re.compile(rf"GPU (\d+) has a total capac(?:i)?ty of {_SIZE}(?: of which {_SIZE} is free)?")
_PROCESS = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed;")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_POOLS = re.compile(rf"with {_SIZE} allocated in private pools")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_BOX = re.compile(r"\s*[│┃|]?\s*\n(?:\[?(?:rank|default)?\d+\]?:)?\s*[│┃|]?\s*")
LENGTH = 1600
"""Characters the sentence takes at most; what follows is another story."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomSentence:
    """The numbers of one sentence, in bytes; None where the wording does not print it."""

    backend: str
    tried_bytes: int
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    """Reserved by PyTorch but not allocated."""
    process_bytes: int | None = None
    """All that this process holds, with context and communicators, as the driver counts it."""
    allowed_bytes: int | None = None
    """Cap set with set_per_process_memory_fraction."""
    pools_bytes: int = 0
    """Allocated in private pools, for example of graphs."""
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of the processes the driver lists; in a container this process may be among them."""

    @property
    def reserved_bytes(self) -> int | None:
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What would be left if free and unused memory lay in one piece; negative: it would not fit even then."""
        if self.free_bytes is None or self.unallocated_bytes is None:
            return None
        return self.free_bytes + self.unallocated_bytes - self.tried_bytes

    @property
    def foreign_bytes(self) -> int | None:
        """Memory that this process's PyTorch does not hold: other processes, and this one's context."""
        if self.total_bytes is None or self.free_bytes is None or self.reserved_bytes is None:
            return None
        own = max(self.reserved_bytes, self.process_bytes or 0)
        return self.total_bytes - self.free_bytes - own


def parse_oom(text: str) -> OomSentence | None:
    """The first out-of-memory sentence in the text; line breaks and box drawings inside it do not matter."""
    text = _BOX.sub(" ", text.replace("\\n", "\n"))
    start = START.search(text)
    if start is None:
        return None
    tail = text[start.start() : start.start() + LENGTH]
    following = START.search(tail, 20)
    tail = tail[: following.start()] if following else tail
    tried = size_bytes(start[2]) if start[2] else _EXABYTE
    if old := _OLD.search(tail):
        return _old(start["backend"], tried, old)
    return _new(start["backend"], tried, tail)


def size_bytes(text: str) -> int:
    """`95.75 MiB` as bytes."""
    number, unit = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip()).groups()  # type: ignore[union-attr]
    return round(float(number) * _UNIT[unit])


def _old(backend: str, tried: int, found: re.Match[str]) -> OomSentence:
    """PyTorch to 2.0. To 1.3 `cached` left out what is allocated; later `reserved in total` holds it."""
    allocated, last = size_bytes(found[3]), size_bytes(found[5])
    return OomSentence(
        backend=backend,
        tried_bytes=tried,
        gpu=int(found[1]),
        total_bytes=size_bytes(found[2]),
        free_bytes=size_bytes(found[4]),
        allocated_bytes=allocated,
        unallocated_bytes=last if found[6] == "cached" else max(last - allocated, 0),
    )


def _new(backend: str, tried: int, tail: str) -> OomSentence:
    """PyTorch from 2.1."""
    gpu = _NEW.search(tail)
    process = _size(_PROCESS, tail)
    return OomSentence(
        backend=backend,
        tried_bytes=tried,
        gpu=int(gpu[1]) if gpu else None,
        total_bytes=size_bytes(gpu[2]) if gpu else None,
        free_bytes=size_bytes(gpu[3]) if gpu and gpu[3] else None,
        allocated_bytes=_size(_ALLOCATED, tail),
        unallocated_bytes=_size(_UNALLOCATED, tail),
        process_bytes=process if process and process < _NO_READING else None,
        allowed_bytes=_size(_ALLOWED, tail),
        pools_bytes=_size(_POOLS, tail) or 0,
        processes=tuple((int(pid), size_bytes(size)) for pid, size in _OTHERS.findall(tail)),
    )


def _size(pattern: re.Pattern[str], tail: str) -> int | None:
    found = pattern.search(tail)
    return size_bytes(found[1]) if found else None
