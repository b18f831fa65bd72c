"""Cost: GPU-hours times a price that carries its date and source."""

from gatewright.spec.errors import UserError
from gatewright.spec.hardware import Gpu, PriceKind
from gatewright.spec.plan import CostEstimate

GIVEN = "given by you"


def estimate_cost(
    gpu: Gpu, *, gpus: int, hours: float, usd_per_gpu_hour: float | None = None, kind: PriceKind = "typical"
) -> CostEstimate:
    """Dollars for `gpus` GPUs over `hours`; a given price beats the catalogue's.

    A price that no source states stays None. Raises UserError for hours or a price that are not positive.
    """
    if hours <= 0 or (usd_per_gpu_hour is not None and usd_per_gpu_hour < 0):
        raise UserError(f"hours {hours:g} and price {usd_per_gpu_hour}: hours must be above 0, the price at least 0.")
    if usd_per_gpu_hour is not None:
        return CostEstimate(
            gpus=gpus, hours=hours, usd_per_gpu_hour=usd_per_gpu_hour, price_date="", price_source=GIVEN
        )
    price = gpu.price(kind)
    return CostEstimate(
        gpus=gpus,
        hours=hours,
        usd_per_gpu_hour=None if price is None else price.usd_per_hour,
        price_date="" if price is None else price.date,
        price_source="no source known for this GPU; give --price" if price is None else price.source,
    )
