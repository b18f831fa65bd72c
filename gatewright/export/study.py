"""A Hugging Face model read once, in float32: its answers on held-out documents, and its importance matrix.

This is transformers' own forward pass, without our seams, so that what it says is an independent word on our files.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gatewright.data.tokenizer import load_tokenizer
from gatewright.export.imatrix import Importance
from gatewright.export.reference import HARD_TEXTS, KEPT, Reference
from gatewright.spec.errors import ModelError

Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the models read."""

    calibration: list[list[int]]
    """Documents of the importance matrix, from the training data."""
    heldout: list[list[int]]
    """Documents that models are compared on."""
    prompts: list[list[int]]
    answer_tokens: int

    @property
    def steps(self) -> int:
        return len(self.calibration) + len(self.heldout) + len(self.prompts)

    @property
    def digest(self) -> str:
        """sha256 of everything that is read."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


def load_plain(folder: Path) -> PreTrainedModel:
    """The folder's model in float32 by transformers alone. Raises ModelError where it cannot be loaded."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot load this model: {str(error).splitlines()[0]}") from None
    # A bare config: what generation_config.json says of sampling has no place in a comparison.
    model.generation_config = GenerationConfig()
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def study(model: PreTrainedModel, folder: Path, sample: Sample, *, tick: Tick) -> tuple[Reference, Importance]:
    """The reference of the model on the held-out documents, and its importance matrix on the calibration ones."""
    importance, coverage = Importance(), Importance()
    done, total = 0, sample.steps
    with importance.watching(model):
        for document in sample.calibration:
            model(input_ids=torch.tensor([document], device=model.device), logits_to_keep=1)
            tick(done := done + 1, total)
    ids, logprobs, following = [], [], []
    with coverage.watching(model):
        for document in sample.heldout:
            top, values, after = _answer(model, document)
            ids.append(top)
            logprobs.append(values)
            following.append(after)
            tick(done := done + 1, total)
    tokenizer = load_tokenizer(folder)
    ends = _ends(folder, tokenizer.eos_token_id)
    answers = []
    for prompt in sample.prompts:
        answers.append(_greedy(model, prompt, tokens=sample.answer_tokens, ends=ends))
        tick(done := done + 1, total)
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = [*HARD_TEXTS, *(f"before{special}after" for special in specials[:16])]
    reference = Reference(
        model=folder.name,
        vocab_size=model.config.get_text_config().vocab_size,
        documents=sample.heldout,
        top_ids_NK=torch.cat(ids).numpy(),
        top_logprobs_NK=torch.cat(logprobs).numpy(),
        next_logprobs_N=torch.cat(following).numpy().astype(np.float32),
        prompts=sample.prompts,
        answers=answers,
        answer_tokens=sample.answer_tokens,
        ends=ends,
        texts=texts,
        text_tokens=[tokenizer(text, add_special_tokens=False).input_ids for text in texts],
        expert_tokens=coverage.expert_tokens(),
    )
    return reference, importance


@torch.no_grad()
def median_kl(model: PreTrainedModel, reference: Reference) -> float:
    """Median KL of a model in memory from a reference, nats."""
    found, at = [], 0
    for document in reference.documents:
        q_TV = model(input_ids=torch.tensor([document], device=model.device)).logits[0].float().log_softmax(-1).cpu()
        ids = torch.from_numpy(reference.top_ids_NK[at : at + len(document)]).long()
        p_TK = torch.from_numpy(reference.top_logprobs_NK[at : at + len(document)])
        found.append((p_TK.exp() * (p_TK - q_TV.gather(1, ids))).sum(-1))
        at += len(document)
    return float(torch.cat(found).median())


def _answer(model: PreTrainedModel, document: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities of the likeliest next tokens [T, K], and the log-probability of what follows [T]."""
    tokens = torch.tensor(document)
    logprobs_TV = model(input_ids=tokens[None].to(model.device)).logits[0].float().log_softmax(-1).cpu()
    values, ids = logprobs_TV.topk(min(KEPT, logprobs_TV.shape[-1]))
    after = torch.full((len(document),), float("nan"))
    after[:-1] = logprobs_TV[:-1].gather(1, tokens[1:, None])[:, 0]
    return ids.int(), values, after


def _greedy(model: PreTrainedModel, prompt: Sequence[int], *, tokens: int, ends: Sequence[int]) -> list[int]:
    given = torch.tensor([list(prompt)], device=model.device)
    plan = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=list(ends) or None, pad_token_id=0, use_cache=True
    )
    made = model.generate(given, attention_mask=torch.ones_like(given), generation_config=plan)
    answer: list[int] = made[0, len(prompt) :].tolist()
    return answer[:-1] if answer and answer[-1] in ends else answer


def _ends(folder: Path, own: int | None) -> list[int]:
    file = folder / "generation_config.json"
    stated = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    stated = [stated] if isinstance(stated, int) else stated or []
    return sorted({*stated, *([own] if own is not None else [])})
