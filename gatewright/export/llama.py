"""llama.cpp's library as we use it: found, its log captured, a model opened and asked for logits.

Only numpy and llama-cpp-python are needed, so a file can be judged on a machine that has nothing else.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp._logger import llama_log_callback  # keeps to the level that a Llama object sets

from gatewright.spec.errors import ModelError

F32 = npt.NDArray[np.float32]


def version() -> str:
    """Of llama-cpp-python, and the CPU features or devices that its library was built for."""
    return f"{llama_cpp.__version__} ({' '.join(llama_cpp.llama_print_system_info().decode().split())})"


@contextmanager
def captured_log(on_text: Callable[[str], None]) -> Iterator[None]:
    """Everything the library says goes to `on_text` instead of stderr."""

    @llama_cpp.llama_log_callback
    def callback(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
        on_text(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama_cpp.llama_log_set(llama_log_callback, ctypes.c_void_p(0))


class Engine:
    """A GGUF model in llama.cpp, with a context of its own."""

    def __init__(self, file: Path, *, context_tokens: int, threads: int | None = None, adapter: Path | None = None):
        """Raises ModelError for a file that llama.cpp does not load, with what it said."""
        said: list[str] = []
        started, before = time.perf_counter(), _resident_bytes()
        try:
            with captured_log(said.append):
                self._llama = llama_cpp.Llama(
                    str(file),
                    n_ctx=context_tokens,
                    n_batch=context_tokens,
                    n_ubatch=min(512, context_tokens),
                    n_gpu_layers=-1,
                    n_threads=threads or len(os.sched_getaffinity(0)),
                    n_threads_batch=threads or len(os.sched_getaffinity(0)),
                    lora_path=None if adapter is None else str(adapter),
                    logits_all=True,
                    verbose=False,
                )
        except (ValueError, RuntimeError, AssertionError) as error:
            told = [line for line in "".join(said).splitlines() if "rror" in line or "fail" in line]
            raise ModelError(f"{file}: llama.cpp cannot load it: {'; '.join(told[-2:]) or error}") from None
        self.load_s = time.perf_counter() - started
        self.vocab_size = self._llama.n_vocab()
        self._before_bytes = before

    @property
    def memory_bytes(self) -> int:
        """What the process has grown by since before the model was loaded; 0 where the system does not say."""
        return max(0, _resident_bytes() - self._before_bytes)

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text, special tokens in it recognised, none added."""
        return list(self._llama.tokenize(text.encode("utf-8", "surrogatepass"), add_bos=False, special=True))

    def logits(self, tokens: Sequence[int]) -> F32:
        """[T, V] from an empty context."""
        self._llama.reset()
        self._llama.eval(list(tokens))
        return self._llama.scores[: len(tokens)]

    def greedy(self, prompt: Sequence[int], *, tokens: int, ends: Sequence[int]) -> list[int]:
        """The likeliest continuation, token by token, without the end token."""
        answer: list[int] = []
        row = self.logits(prompt)[-1]
        while len(answer) < tokens:
            choice = int(row.argmax())
            if choice in ends:
                break
            answer.append(choice)
            self._llama.eval([choice])
            row = self._llama.scores[self._llama.n_tokens - 1]
        return answer

    def close(self) -> None:
        self._llama.close()


def open_engine(
    file: Path, *, context_tokens: int, threads: int | None = None, adapter: Path | None = None
) -> "closing[Engine]":
    """An engine for a with block."""
    return closing(Engine(file, context_tokens=context_tokens, threads=threads, adapter=adapter))


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
