"""Which experts get an adapter in a run: named in the run file, or the most routed on training documents."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from gatewright.data.batch import make_batch
from gatewright.data.loader import Loader
from gatewright.model.base_files import base_fingerprint
from gatewright.model.routing import count_routing
from gatewright.model.subset import most_routed, named_experts
from gatewright.parallel.ranks import Ranks
from gatewright.spec.run import Run
from gatewright.train.forward import hidden_states

FILE = "experts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The experts of each layer that get an adapter, and a sentence on how they came to it."""

    layers: dict[int, list[int]]
    note: str


def choose_experts(run: Run, model: PreTrainedModel, loader: Loader, *, ranks: Ranks) -> Chosen | None:
    """The run's choice, the same on every rank; None where every expert gets an adapter.

    To be called on all ranks, before adapters are added. A measured choice is kept in the run folder, so that a resumed
    run has the same even on another machine, or another number of ranks.
    Raises ModelError for a named layer or expert that the model does not have.
    """
    subset = run.method.adapter.experts if run.method.adapter else None
    if subset is None:
        return None
    if subset.layers is not None:
        layers = named_experts(model, subset.layers)
        total = sum(len(experts) for experts in layers.values())
        return Chosen(layers=layers, note=f"{total} experts in {len(layers)} layers get an adapter, as named")
    assert subset.most_routed is not None
    asked = {"most_routed": subset.most_routed, "documents": subset.documents, "data": run.data.train}
    asked["base"] = base_fingerprint(Path(run.model.path))
    file = run.folder / FILE
    kept = ranks.tell(_read(file) if ranks.first else None)
    if kept is not None and kept["asked"] == asked:
        return Chosen(layers={int(layer): experts for layer, experts in kept["layers"].items()}, note=kept["note"])
    # Each rank counts what all route; the first one's numbers hold, should kernels have rounded one otherwise.
    counts = ranks.tell(routing_counts(model, loader, documents=subset.documents, device=ranks.device))
    layers = most_routed(counts, subset.most_routed)
    caught = sum(counts[layer][expert] for layer, experts in layers.items() for expert in experts)
    share = caught / max(1, sum(map(sum, counts.values())))
    note = (
        f"the {subset.most_routed:.0%} most-routed experts of each layer get an adapter; they took {share:.0%} of the "
        f"assignments in {min(subset.documents, len(loader.view.lengths))} training documents"
    )
    if ranks.first and file.parent.is_dir():
        content = {"asked": asked, "layers": layers, "note": note}
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return Chosen(layers=layers, note=note)


@torch.no_grad()
def routing_counts(
    model: PreTrainedModel, loader: Loader, *, documents: int, device: torch.device
) -> dict[int, list[int]]:
    """Layer -> tokens that each expert got, over the first `documents` documents in the run's own order."""
    was_training = model.training
    model.eval()
    counts: dict[int, torch.Tensor] = {}
    left, step = min(documents, len(loader.view.lengths)), 0
    while left:
        for batch in loader.step(step):
            numbers = list(batch.documents[:left])
            left -= len(numbers)
            if numbers:
                with count_routing() as routing:
                    hidden_states(model, make_batch(loader.view, numbers).to(device))
                for layer, counts_E in routing.by_layer.items():
                    counts[layer] = counts.get(layer, 0) + counts_E.cpu()
        step += 1
    model.train(was_training)
    return {layer: counts_E.tolist() for layer, counts_E in sorted(counts.items())}


def _read(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
