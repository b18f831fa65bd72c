"""The importance matrix: the mean square of each input channel of each weight, measured while the model reads text.

Quantisation rounds the channels that carry much more carefully. Experts have a row each, from the tokens that were
routed to them. Linear layers are watched by hooks; for a stack of experts, what enters its down projection is computed
again from what enters the stack.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from gatewright.model.experts import find_experts

UNSEEN = 1.0
"""Of the channels of an expert that no token reached: all alike, as without a matrix."""


class Importance:
    """Sums of squares by module path, and how many rows they are of."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        """[in], or [E, in]: float64."""
        self.rows: dict[str, Tensor] = {}
        """[] or [E]."""

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """While this lasts, every forward pass of the model is counted."""
        stacks = {module: layer for layer, module in find_experts(model).items()}
        hooks = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                hooks.append(module.register_forward_pre_hook(self._linear(name)))
            elif module in stacks:
                hooks.append(module.register_forward_pre_hook(self._experts(name), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _linear(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            self._add(name, x.square().sum(0, dtype=torch.float64), torch.tensor(len(x)))

        return hook

    def _experts(self, name: str) -> Any:
        def hook(experts: Any, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            x_TH, index_Tk = (*inputs, *named.values())[:2]
            weight = experts.gate_up_proj if experts.has_gate else experts.up_proj
            into_EH = x_TH.new_zeros(experts.num_experts, x_TH.shape[-1], dtype=torch.float64)
            within: list[Tensor] = []
            rows_E = torch.bincount(index_Tk.reshape(-1), minlength=experts.num_experts)
            for expert in range(experts.num_experts):
                x_SH = x_TH[(index_Tk == expert).any(dim=-1)]
                into_EH[expert] = x_SH.square().sum(0, dtype=torch.float64)
                up_SI = x_SH @ weight[expert] if experts.is_transposed else F.linear(x_SH, weight[expert])
                if experts.has_bias:
                    up_SI = up_SI + (experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias)[expert]
                inner_SI = experts._apply_gate(up_SI) if experts.has_gate else experts.act_fn(up_SI)
                within.append(inner_SI.square().sum(0, dtype=torch.float64))
            self._add(f"{name}.up", into_EH, rows_E)
            self._add(f"{name}.down", torch.stack(within), rows_E)

        return hook

    def _add(self, name: str, squares: Tensor, rows: Tensor) -> None:
        squares, rows = squares.cpu(), rows.cpu()
        if name in self.squares:
            self.squares[name] += squares
            self.rows[name] += rows
        else:
            self.squares[name], self.rows[name] = squares, rows

    def expert_tokens(self) -> dict[str, list[int]]:
        """Layer -> assignments each expert got."""
        found = {}
        for name, rows in self.rows.items():
            if rows.dim() and name.endswith(".up") and (layer := re.search(r"\.(\d+)\.", name)):
                found[layer[1]] = rows.tolist()
        return found

    def by_gguf_name(self, *, architecture: str, layers: int) -> dict[str, npt.NDArray[np.float32]]:
        """The matrix under the names of the GGUF file's tensors; of the head there is none, as llama.cpp has it."""
        kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, layers)
        found: dict[str, npt.NDArray[np.float32]] = {}
        for path, squares in self.squares.items():
            mean = squares / self.rows[path].clamp(min=1)[..., None]
            if squares.dim() == 2:
                mean[self.rows[path] == 0] = UNSEEN
                prefix, _, side = path.rpartition(".")
                parts = ("gate_proj", "up_proj") if side == "up" else ("down_proj",)
                keys = [f"{prefix}.{part}" for part in parts]
            else:
                keys = [path]
            for key in keys:
                name = names.get_name(f"{key}.weight", try_suffixes=(".weight",))
                if name is not None and name != "output.weight":
                    found[name] = mean.float().numpy()
        return found


def save_importance(matrix: Mapping[str, npt.NDArray[np.float32]], file: Path) -> None:
    """As numpy's .npz, written whole or not at all."""
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as stream:
        np.savez(stream, **matrix)  # type: ignore[arg-type]
    partial.replace(file)


def load_importance(file: Path) -> dict[str, npt.NDArray[np.float32]]:
    with np.load(file, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}
