"""The 4-bit round trip: a normal matrix stored as the trainer stores it, made dense again, and multiplied."""

from dataclasses import asdict

import torch

from gatewright.model.four_bit import quantize_nf4
from gatewright.probe.absent import Absent
from gatewright.probe.children import Wanted
from gatewright.spec.errors import UserError
from gatewright.spec.probe import FourBit

SHAPE = torch.Size((512, 1024))
ROWS = 64


def measure_four_bit(wanted: Wanted) -> tuple[str, dict[str, object]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator)
    x = torch.randn(ROWS, SHAPE[1], generator=generator)
    try:
        stored = quantize_nf4([weight], shape=SHAPE, dtype=torch.bfloat16, device=device, name="probe")
    except UserError as missing:
        raise Absent(str(missing)) from None
    dense = stored.dense(torch.bfloat16)
    product = (x.to(device, torch.bfloat16) @ dense.T).float().cpu()
    four_bit = FourBit(
        device=device.type,
        error=relative(dense.float().cpu(), weight),
        product_error=relative(product, x @ dense.float().cpu().T),
    )
    text = f"NF4 on {device.type}: off by {four_bit.error:.3f} of the weights (normal weights: 0.09), "
    return text + f"product off by {four_bit.product_error:.1e}", asdict(four_bit)


def relative(made: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values."""
    return float((made - exact).square().mean().sqrt() / exact.square().mean().sqrt())
