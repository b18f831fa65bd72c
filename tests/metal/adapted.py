"""Models with adapters that change the output, beside the same ones in stock PEFT."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from gatewright.data.batch import Batch
from gatewright.model.adapter_files import adapter_entries
from gatewright.model.adapters import add_adapters
from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.spec import run as spec
from gatewright.train.forward import model_inputs

CPU = torch.device("cpu")
TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(7))
BATCH = Batch(
    tokens_T=TOKENS[0],
    labels_T=TOKENS[0],
    positions_T=torch.arange(40),
    cu_seqlens_S1=torch.tensor([0, 40], dtype=torch.int32),
    lengths=(40,),
    documents=(0,),
)
ONE_DOCUMENT = {name: value for name, value in model_inputs(BATCH).items() if name != "input_ids"}


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    model = spec.Model(path=str(folder), dtype=dtype)
    return load_model(model, device=CPU, kernel=choose_kernel(CPU, getattr(torch, dtype)))


def adapted(
    folder: Path, adapter: spec.Adapter, *, seed: int = 1, dtype: str = "float32", **chosen: dict[int, list[int]] | None
) -> PreTrainedModel:
    """The model with adapters, and copies that train in full, moved off their start, so that they change the output."""
    model = load(folder, dtype)
    add_adapters(model, adapter, seed=seed, **chosen)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for entry in adapter_entries(model, adapter).values():
            if entry.tensor.requires_grad:
                entry.tensor.add_(torch.randn(entry.tensor.shape, generator=generator) * 0.1)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=TOKENS, **ONE_DOCUMENT).logits


def peft_gradients(model: PeftModel) -> dict[str, torch.Tensor]:
    """Gradient of everything that trains, by its key in an adapter file."""
    names = {
        name.replace(".modules_to_save.default", "").replace(".default", ""): p for name, p in model.named_parameters()
    }
    return {name: p.grad for name, p in names.items() if p.requires_grad}


def our_gradients(model: PreTrainedModel, adapter: spec.Adapter) -> dict[str, torch.Tensor]:
    """The same of ours, in the file's layout."""
    entries = adapter_entries(model, adapter)
    return {key: entry.fold(entry.tensor.grad) for key, entry in entries.items() if entry.tensor.requires_grad}
