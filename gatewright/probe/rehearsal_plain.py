"""Rehearsal of a step by transformers and PEFT alone, as the Hugging Face Trainer takes it: the yardstick for ours."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from gatewright.model.head import head_of
from gatewright.parallel.layout import Layout
from gatewright.parallel.ranks import SHARD, Ranks
from gatewright.probe.fake_attention import FlashMemory
from gatewright.probe.fake_memory import LiveBytes
from gatewright.probe.fake_ranks import first_of
from gatewright.probe.rehearsal_depth import decoder_blocks
from gatewright.probe.rehearsal_observe import held_after, observe
from gatewright.spec.errors import RunFileError
from gatewright.spec.rehearsal import Held, Rehearsal
from gatewright.train.loss import token_loss_sum

ATTENTION = "memory_only"  # a name with "flash" in it makes transformers look for a kernel package


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """The settings of a Trainer run that decide its memory; bfloat16 weights, AdamW of torch."""

    rows: int
    tokens_per_row: int
    lora_rank: int | None = None
    """None: full fine-tuning."""
    target_modules: tuple[str, ...] = ()
    checkpointing: bool = True
    loss: Literal["transformers", "upcast_and_shift", "chunked"] = "transformers"
    """transformers: bf16 logits raised to fp32, labels shifted (12 bytes a logit at the peak). upcast_and_shift: fp32
    logits beside the bf16 ones, shifted by a copy (14), which is what runs of transformers up to 4.44 measured.
    chunked: no logits kept, like Liger's fused linear cross-entropy."""
    foreach: bool = True
    """AdamW over all parameters at once (the Trainer's adamw_torch); False: fused."""
    ranks: int = 1
    """GPUs over which FSDP shards every block, and what is outside of them together, as the Trainer has it wrapped."""


def rehearse_plain(config: PretrainedConfig, step: PlainStep, *, model: str, full_depth: bool = False) -> Rehearsal:
    """Peak bytes of the second step on one GPU, of several with FSDP. Raises as `rehearse` does."""
    if min(step.rows, step.tokens_per_row - 1) < 1:
        raise RunFileError(f"rehearsal: {step.rows} rows of {step.tokens_per_row} tokens; give at least 1 of 2 tokens")
    AttentionInterface.register(ATTENTION, _fake_flash)
    input_ids = torch.zeros(step.rows, step.tokens_per_row, dtype=torch.int64)
    layout = Layout(ranks=step.ranks, dense="zero3") if step.ranks > 1 else Layout()
    with first_of(layout) as ranks:
        return observe(
            lambda: _build(deepcopy(config), step, ranks),
            lambda built, live: _take_steps(built, step, input_ids, live),
            model=model,
            trainer="transformers",
            lengths=(step.tokens_per_row,) * step.rows,
            layout=layout.describe(),
            attention="flash-attn",
            reach=2 if step.ranks > 1 else 0,
            full_depth=full_depth,
        )


def _build(config: PretrainedConfig, step: PlainStep, ranks: Ranks) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    if step.lora_rank is not None:
        model.enable_input_require_grads()
        lora = LoraConfig(r=step.lora_rank, target_modules=list(step.target_modules), task_type="CAUSAL_LM")
        model = get_peft_model(model, lora).get_base_model()  # LoRA is in place; the wrapper only forwards
    if step.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not ranks.alone:
        for module in (*decoder_blocks(model), model):
            fully_shard(module, mesh=ranks.part(SHARD))
    return model


def _take_steps(model: PreTrainedModel, step: PlainStep, input_ids: Tensor, live: LiveBytes) -> Held:
    trained = [p for p in model.parameters() if p.requires_grad]
    owned = [nn.Parameter(p.to_local()) if isinstance(p, DTensor) else p for p in trained]
    optimizer = torch.optim.AdamW(owned, lr=1e-5, foreach=step.foreach, fused=not step.foreach)
    compute_loss = _LOSSES[step.loss]
    model.train()
    for _ in range(2):
        live.begin_step()
        compute_loss(model, input_ids).backward()  # the Trainer keeps no loss with a graph from one step to the next
        for p, own in zip(trained, owned, strict=True):
            if isinstance(p.grad, DTensor):
                own.grad, p.grad = p.grad.to_local(), None
        nn.utils.clip_grad_norm_(owned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return held_after(model, trained=trained, owned=owned, optimizer=optimizer)


def _loss(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss


def _loss_upcast_and_shift(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    model.loss_function = _upcast_and_shift
    return _loss(model, input_ids)


def _upcast_and_shift(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    raised = logits.float()
    shifted = raised[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels[..., 1:].reshape(-1))


def _loss_chunked(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return token_loss_sum(hidden.flatten(0, 1), head_of(model), input_ids.flatten(), chunk_tokens=1024)


_LOSSES: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {
    "transformers": _loss,
    "upcast_and_shift": _loss_upcast_and_shift,
    "chunked": _loss_chunked,
}


def _fake_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Batched attention, [B, heads, T, D] in and [B, T, heads, D] out, as rows of one token axis."""
    rows = query.shape[0]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return FlashMemory.apply(q, k, v, rows, 1).unflatten(0, (rows, -1)), None
