"""Llama 4's experts behind the experts seam: transformers runs every token through every expert and has no seam there.

Its router multiplies an expert's *input* by the routing weight, so a token chosen by k experts makes k different rows.

Shapes: T tokens, k choices a token, H hidden, E experts.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from gatewright.model.experts import experts_forward


def adopt(model: nn.Module) -> None:
    """Gives Llama 4's experts the form that transformers' experts interface has elsewhere; other models stay as is."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            module.forward = MethodType(_moe, module)  # type: ignore[method-assign]
            module.router.forward = MethodType(_route, module.router)  # type: ignore[method-assign]
        elif isinstance(module, Llama4TextExperts):
            module.is_transposed, module.has_gate = True, True
            module.has_bias, module.has_post_expert_norm = False, False
            module._apply_gate = MethodType(_apply_gate, module)
            module.forward = MethodType(experts_forward, module)  # type: ignore[method-assign]


def _route(self: nn.Linear, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, E], routing weights [T, k], chosen experts [T, k]), as other routers of transformers give them."""
    logits_TE = nn.functional.linear(x_TH, self.weight)
    top_Tk, expert_Tk = logits_TE.topk(self.top_k, dim=1)
    return logits_TE, top_Tk.float().sigmoid().to(logits_TE.dtype), expert_Tk


def _moe(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """(output [T, H], router logits [T, E]) of the layer, running each token through its chosen experts only."""
    x_TH = hidden_states.reshape(-1, self.hidden_dim)
    logits_TE, weight_Tk, expert_Tk = self.router(x_TH)
    rows_SH = (x_TH[:, None] * weight_Tk[..., None]).flatten(0, 1)
    routed_SH = self.experts(rows_SH, expert_Tk.reshape(-1, 1), torch.ones_like(rows_SH[:, :1]))
    return self.shared_expert(x_TH) + routed_SH.view(len(x_TH), self.top_k, -1).sum(dim=1), logits_TE


def _apply_gate(self: nn.Module, gate_up_S: Tensor) -> Tensor:
    gate_SI, up_SI = gate_up_S.chunk(2, dim=-1)
    return up_SI * self.act_fn(gate_SI)
