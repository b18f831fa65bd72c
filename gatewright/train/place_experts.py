"""Which experts a rank holds in a run: dealt by loads that are measured on training documents before step 1."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gatewright.data.loader import Loader
from gatewright.model.base_files import base_fingerprint
from gatewright.parallel.deal import deal_experts
from gatewright.parallel.ranks import Ranks
from gatewright.router.placement import contiguous, place, worst_rank_loads
from gatewright.spec.event import Finding
from gatewright.spec.run import Run
from gatewright.train.choose_experts import routing_counts

FILE = "placement.json"
DOCUMENTS = 64
"""Training documents that the measurement reads."""


def place_experts(run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks) -> Finding:
    """Deals the experts of each layer to the ranks by their loads; says what that does for the busiest rank.

    To be called before adapters are added. The loads are kept in the run folder, so that a resumed run, perhaps on
    another number of ranks, places by the same.
    """
    if ranks.layout.ep == 1:
        text = "router.placement: measured changes nothing where every rank holds all experts (parallel.ep: 1)"
        return Finding(severity="note", text=text)
    ep, loads = ranks.layout.ep, _loads(run, model, loader, ranks=ranks)
    placed = place(list(loads.values()), ep=ep)
    deal_experts(model, dict(zip(loads, placed.order, strict=True)), ranks)
    straight = contiguous(layers=len(loads), experts=len(placed.order[0]), ep=ep)
    worst = [worst_rank_loads(placement, list(loads.values())) for placement in (straight, placed)]
    before, after = (sum(layers) / len(layers) for layers in worst)
    text = (
        f"router.placement: experts placed by their loads in {min(DOCUMENTS, len(loader.view.lengths))} training "
        f"documents; busiest of {ep} ranks, mean of {len(loads)} layers: {before:.2f} → {after:.2f} times the fair load"
    )
    return Finding(severity="note", text=text)


def _loads(run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks) -> dict[int, list[int]]:
    """Layer -> tokens that each expert got; read back where the run folder has them for the same data and model."""
    asked = {"documents": DOCUMENTS, "data": run.data.train, "base": base_fingerprint(Path(run.model.path))}
    file = run.folder / FILE
    kept = ranks.tell(_read(file) if ranks.first else None)
    if kept is not None and kept["asked"] == asked:
        return {int(layer): counts for layer, counts in kept["loads"].items()}
    # Each rank counts what all route; the first one's numbers hold, should kernels have rounded one otherwise.
    loads = ranks.tell(routing_counts(model, loader, documents=DOCUMENTS, device=ranks.device))
    if ranks.first and file.parent.is_dir():
        file.write_text(json.dumps({"asked": asked, "loads": loads}) + "\n", encoding="utf-8")
    return loads


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
