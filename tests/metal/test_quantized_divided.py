"""A weight in few bits cut into runs of bytes: put together it is the weight, whatever the number of processes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gatewright.model.four_bit import quantize_nf4
from gatewright.model.fp8 import fp8_weight
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_divided import DividedWeight, Shares, divided


def rows_of(value: Tensor, rows: range) -> Tensor:
    return value[rows.start : rows.stop] if value.dim() == 3 else value


def nf4(value: Tensor, rows: range) -> QuantizedWeight:
    own, cpu = rows_of(value, rows), torch.device("cpu")
    matrices = own.reshape(-1, *own.shape[-2:])
    return quantize_nf4(matrices, shape=own.shape, dtype=torch.float32, device=cpu, name="w", first=rows.start)


def fp8(value: Tensor, rows: range) -> QuantizedWeight:
    codes = value.to(torch.float8_e4m3fn)
    scale = torch.linspace(0.5, 2.0, value.shape[:-1].numel()).view(*value.shape[:-1], 1)
    return fp8_weight(rows_of(codes, rows), rows_of(scale, rows), block=None, name="w")


def cut(pack: Callable[[range], QuantizedWeight], rows: range, count: int, at_once: int = 1) -> list[DividedWeight]:
    """What each of `count` processes keeps; a gather reads the others' here."""
    kept: list[DividedWeight] = []

    def gather(_: Tensor) -> Tensor:
        return torch.cat([weight.parts["bytes"] for weight in kept])

    for position in range(count):
        shares = Shares(count=count, position=position, gather=gather)
        kept.append(divided(pack, rows, shares, at_once=at_once))
    return kept


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("shape", [(64, 96), (7, 9), (6, 32, 48), (5, 9, 11)])
@pytest.mark.parametrize("form", [nf4, fp8])
def test_runs_put_together_are_the_weight(form: Callable, shape: tuple[int, ...], count: int) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows = range(shape[0] if len(shape) == 3 else 1)
    whole = form(value, rows)
    kept = cut(lambda some: form(value, some), rows, count)
    assert len({weight.stored_bytes for weight in kept}) == 1
    total = whole.matrices * whole.matrix_bytes
    assert total <= count * kept[0].stored_bytes < total + count
    for weight in kept:
        assert weight.shape == whole.shape
        assert torch.equal(weight.dense(torch.float32), whole.dense(torch.float32))


def test_a_process_packs_no_others_matrices_where_the_number_divides_them() -> None:
    value, packed = torch.randn(6, 32, 48), []

    def pack(rows: range) -> QuantizedWeight:
        packed.append(rows)
        return nf4(value, rows)

    first, second = cut(pack, range(6), 2)
    assert packed == [range(n, n + 1) for n in range(6)]
    assert first.own_EB is not None and len(first.own_EB) == len(second.own_EB) == 3
    assert torch.equal(second.own_EB, nf4(value, range(3, 6)).packed_EB())
    assert all(weight.own_EB is None for weight in cut(pack, range(6), 4, at_once=6))
