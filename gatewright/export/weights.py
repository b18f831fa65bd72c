"""The weights of a quantised file beside those of the file it was made from.

Answers to documents prove the experts that got tokens. This looks at every matrix, and at each expert of a stack,
whether a token ever reached it or not: a scrambled or swapped one is off by more than its own size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

ROWS = 8
"""Rows of each matrix that are compared, spread over all of them."""
WEIGHT_ERROR = 0.5
"""‖quantised − exact‖ / ‖exact‖ of one matrix, at most. Sound ones measure 0.15 at most (Q3_K), another weight 1.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightError:
    """The matrix that lost most."""

    tensor: str
    expert: int | None
    """None where the tensor is one matrix."""
    error: float

    def __str__(self) -> str:
        return self.tensor if self.expert is None else f"{self.tensor}, expert {self.expert}"


def worst_weight(file: Path, source: Path) -> WeightError:
    """The matrix of `file` that is farthest from the one in `source`, both GGUF; one that is missing is at infinity."""
    exact = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    if lost := sorted(exact.keys() ^ found.keys()):
        return WeightError(tensor=lost[0], expert=None, error=float("inf"))
    return max((one for name in exact for one in _errors(found[name], exact[name])), key=lambda one: one.error)


def _errors(found: gguf.ReaderTensor, exact: gguf.ReaderTensor) -> Iterator[WeightError]:
    with np.errstate(invalid="ignore", divide="ignore"):
        got_ERI, want_ERI = _some_rows(found), _some_rows(exact)
        squares_E = np.square(got_ERI - want_ERI).sum((1, 2)) / np.square(want_ERI).sum((1, 2))
    # Rows of zeros that stay zeros are 0/0, and right; NaN in the file is never right.
    error_E = np.where((got_ERI == want_ERI).all((1, 2)), 0.0, np.sqrt(squares_E))
    error_E = np.nan_to_num(error_E, nan=np.inf)
    for expert, error in enumerate(error_E):
        yield WeightError(tensor=exact.name, expert=expert if len(exact.shape) == 3 else None, error=float(error))


def _some_rows(tensor: gguf.ReaderTensor) -> np.ndarray:
    """[E, ROWS, in] in float64; one matrix, or one row, is a stack of one."""
    data = tensor.data
    while data.ndim < 3:
        data = data[None]
    rows = np.unique(np.linspace(0, data.shape[1] - 1, ROWS).astype(int))
    return dequantize(np.ascontiguousarray(data[:, rows]), tensor.tensor_type).astype(np.float64)
