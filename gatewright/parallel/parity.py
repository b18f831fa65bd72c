"""A self-test on the user's own machine: divided experts must compute what whole ones do, over the real links.

Every rank makes the same copy of the run's model, two layers deep and with random weights, and takes its own tokens
through it: once with all experts on the rank, once divided. Outputs must agree, and so must the gradients of the
experts, those of the whole copies summed over ranks.

Shapes: T tokens, H hidden.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gatewright.model.attention import NAME, choose_kernel, install
from gatewright.model.experts import find_experts, hold, lora_shapes
from gatewright.model.four_bit import quantize_nf4
from gatewright.model.fp8 import fp8_weight
from gatewright.model.head import decoder
from gatewright.model.load import put_seams
from gatewright.model.quantized import QuantizedWeight
from gatewright.model.quantized_load import Quantize
from gatewright.parallel.dispatch import Dispatch
from gatewright.parallel.layout import refuse_experts
from gatewright.parallel.ranks import Ranks

LAYERS = 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest relative difference: sums over an expert's rows are made in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Relative differences between divided and whole experts, the largest over ranks."""

    output: float
    gradients: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return max(self.output, self.gradients) <= self.tolerance


def compare(
    config: PretrainedConfig,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    quantize: Quantize = "none",
    tokens: int = 64,
    seed: int = 0,
) -> Parity:
    """Runs both on `tokens` random tokens a rank, their experts stored as `quantize` says.

    Experts in few bits have no gradients: there, those of the embedding are compared, which come through the experts.
    Raises RunFileError where ep does not divide the experts.
    """
    install(choose_kernel(ranks.device, dtype))
    whole, divided = (_copy(config, ranks, dtype=dtype, seed=seed) for _ in range(2))
    experts = find_experts(divided)
    refuse_experts(ranks.layout, max((module.num_experts for module in experts.values()), default=0))
    dispatch = Dispatch(ranks.part("ep").get_group())
    for module in experts.values():
        _keep_own(module, ranks)
        module.gatewright_dispatch = dispatch
    if quantize != "none":
        for model in (whole, divided):
            _store_in_few_bits(model, quantize)
    draw = torch.Generator().manual_seed(seed + 1 + ranks.rank)
    tokens_T = torch.randint(config.get_text_config().vocab_size, (tokens,), generator=draw).to(ranks.device)
    want_TH, got_TH = _through(whole, tokens_T), _through(divided, tokens_T)
    output = _difference(got_TH, want_TH)
    gradients = _gradient_difference(whole, divided, ranks, in_few_bits=quantize != "none")
    worst = [max(column) for column in zip(*ranks.gather([output, gradients]), strict=True)]
    return Parity(output=worst[0], gradients=worst[1], tolerance=TOLERANCE[dtype])


def _gradient_difference(whole: PreTrainedModel, divided: PreTrainedModel, ranks: Ranks, *, in_few_bits: bool) -> float:
    if in_few_bits:
        want, got = (model.get_input_embeddings().weight.grad for model in (whole, divided))
        return _difference(got, want)
    experts, largest = find_experts(divided), 0.0
    for layer, module in find_experts(whole).items():
        for name, stack in module.named_parameters(recurse=False):
            want = ranks.sum(stack.grad.float())
            got = experts[layer].get_parameter(name).grad.float()
            got = got if ranks.layout.edp * ranks.layout.copies == 1 else _sum_copies(got, ranks)
            largest = max(largest, _difference(got, want.chunk(ranks.layout.ep)[ranks.position("ep")]))
    return largest


def _copy(config: PretrainedConfig, ranks: Ranks, *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    shallow = deepcopy(config)
    text = shallow.get_text_config()
    text.num_hidden_layers = LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        if text.to_dict().get(key):
            text.__dict__[key] = text.to_dict()[key][-LAYERS:]
    if text.to_dict().get("first_k_dense_replace"):
        text.first_k_dense_replace = LAYERS - 1
    if text.to_dict().get("mlp_only_layers"):
        text.mlp_only_layers = []
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shallow, dtype=dtype, attn_implementation=NAME).to(ranks.device)
    put_seams(model, source="the two-layer copy")
    for module in find_experts(model).values():
        for stack in module.parameters(recurse=False):
            stack.requires_grad_()
    return model.train()


def _keep_own(module: nn.Module, ranks: Ranks) -> None:
    """Leaves this rank's experts of a module that holds all of them."""
    count = module.num_experts // ranks.layout.ep
    hold(module, range(module.num_experts), first=ranks.position("ep") * count, count=count)
    for name, stack in list(module.named_parameters(recurse=False)):
        own = stack.detach().chunk(ranks.layout.ep)[ranks.position("ep")].clone()
        module.register_parameter(name, nn.Parameter(own))


def _store_in_few_bits(model: PreTrainedModel, quantize: Quantize) -> None:
    """Packs the experts' stacks, frozen; the embedding gets gradients in their place."""
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_()
    for module in find_experts(model).values():
        for name in lora_shapes(module):
            packed = _packed(module.get_parameter(name).detach(), quantize)
            module.register_parameter(name, nn.Parameter(packed, requires_grad=False))


def _packed(stack_ENK: Tensor, quantize: Quantize) -> QuantizedWeight:
    if quantize == "nf4":
        return quantize_nf4(
            stack_ENK, shape=stack_ENK.shape, dtype=stack_ENK.dtype, device=stack_ENK.device, name="the copy's experts"
        )
    scale_EN1 = stack_ENK.float().abs().amax(dim=-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    codes_ENK = (stack_ENK.float() / scale_EN1).to(torch.float8_e4m3fn)
    return fp8_weight(codes_ENK, scale_EN1, block=None, name="the copy's experts")


def _through(model: PreTrainedModel, tokens_T: Tensor) -> Tensor:
    """Hidden states [T, H] of one document, after a backward pass from their squares."""
    bounds = torch.tensor([0, len(tokens_T)], dtype=torch.int32, device=tokens_T.device)
    hidden_TH = decoder(model)(
        input_ids=tokens_T[None],
        position_ids=torch.arange(len(tokens_T), device=tokens_T.device)[None],
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=len(tokens_T),
        max_length_k=len(tokens_T),
        use_cache=False,
    ).last_hidden_state[0]
    hidden_TH.float().square().mean().backward()
    return hidden_TH.detach()


def _sum_copies(grad: Tensor, ranks: Ranks) -> Tensor:
    for dimension in ("edp", "copy"):
        torch.distributed.all_reduce(grad, group=ranks.part(dimension).get_group())
    return grad


def _difference(got: Tensor, want: Tensor) -> float:
    return ((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-12)).item()
