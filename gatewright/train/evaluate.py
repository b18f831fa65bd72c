"""Held-out loss, and answers by greedy decoding compared with the answers in the data."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gatewright.data.loader import Loader
from gatewright.data.view import DocumentView
from gatewright.model import attention, per_document
from gatewright.model.head import Head
from gatewright.parallel.ranks import Ranks
from gatewright.spec.event import Evaluated
from gatewright.train.context import on_device
from gatewright.train.forward import hidden_states
from gatewright.train.loss import token_loss_sum

SAMPLES = 8
ROWS_AT_ONCE = 16
PROMPT_TOKENS_AT_ONCE = 4096
"""Limit of rows × longest prompt, so that a few long prompts are not multiplied by padding."""


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt and the expected last answer of one held-out document, as tokens."""

    prompt: list[int]
    answer: list[int]


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    head: Head,
    tokenizer: PreTrainedTokenizerBase,
    loader: Loader,
    *,
    step: int,
    questions: list[Question],
    max_new_tokens: int,
    loss_chunk_tokens: int,
    device: torch.device,
    ranks: Ranks,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluated | None:
    """Mean loss over all held-out target tokens, and how many of `questions` are answered word for word.

    Ranks share the documents; the questions every rank answers, since some of the model may lie on the others.
    None where `stopping`, asked before every batch and every group of answers, said yes: half of it says nothing.
    """
    began = time.perf_counter()
    model.eval()
    loss_sum, target_tokens = 0.0, 0
    for batch in loader.whole():
        if stopping():
            return None
        batch = on_device(batch, ranks)
        hidden_TH = hidden_states(model, batch)
        loss_sum += token_loss_sum(hidden_TH, head, batch.labels_T, chunk_tokens=loss_chunk_tokens).item()
        target_tokens += batch.target_tokens
    loss_sum, target_tokens = ranks.sum(torch.tensor([loss_sum, target_tokens], dtype=torch.float64)).tolist()
    if stopping():
        return None
    answers = answer(
        model, tokenizer, questions, max_new_tokens=max_new_tokens, device=device, together=not ranks.alone
    )
    expected = [tokenizer.decode(q.answer, skip_special_tokens=True).strip() for q in questions]
    samples = [
        {"prompt": tokenizer.decode(q.prompt, skip_special_tokens=False), "expected": want, "answer": got}
        for q, want, got in zip(questions[:SAMPLES], expected, answers, strict=False)
    ]
    return Evaluated(
        step=step,
        loss=loss_sum / target_tokens,
        target_tokens=int(target_tokens),
        asked=len(questions),
        correct=sum(want == got for want, got in zip(expected, answers, strict=True)),
        samples=samples,
        seconds=time.perf_counter() - began,
    )


def questions_of(view: DocumentView, *, count: int) -> list[Question]:
    """Every so-manieth document, up to `count`, split before its last run of target tokens."""
    total = len(view.lengths)
    picked = [index * total // min(count, total) for index in range(min(count, total))]
    questions = []
    for index in picked:
        tokens, is_target = view.document(index)
        end = len(tokens)
        while end and not is_target[end - 1]:
            end -= 1
        begin = end
        while begin and is_target[begin - 1]:
            begin -= 1
        if begin:
            questions.append(Question(tokens[:begin].tolist(), tokens[begin:end].tolist()))
    return questions


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: list[Question],
    *,
    max_new_tokens: int,
    device: torch.device,
    together: bool = False,
) -> list[str]:
    """Greedy answers, stripped; `together`: every rank goes on until the last is done.

    Decoding needs a key/value cache, so transformers' own attention serves meanwhile.
    """
    if not questions:
        return []
    stops = sorted({q.answer[-1] for q in questions} & set(tokenizer.all_special_ids)) or [tokenizer.eos_token_id]
    answers = [""] * len(questions)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    rows_at_once = ROWS_AT_ONCE if per_document.takes_padding(model, device) else 1
    # The last position is a slice of the prompt: left as it is, torch would copy the head's weight once a row.
    whole = model.get_output_embeddings().register_forward_pre_hook(lambda head, inputs: (inputs[0].contiguous(),))
    try:
        for rows in _groups([len(q.prompt) for q in questions], rows_at_once):
            longest = max(len(questions[i].prompt) for i in rows)
            padding = [longest - len(questions[i].prompt) for i in rows]
            prompts = [[stops[0]] * pad + questions[i].prompt for i, pad in zip(rows, padding, strict=True)]
            mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
            generated = model.generate(
                input_ids=torch.tensor(prompts, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=stops[0],
                use_cache=True,
                synced_gpus=together,
            )
            for i, row in zip(rows, generated[:, longest:], strict=True):
                answers[i] = tokenizer.decode(row, skip_special_tokens=True).strip()
    finally:
        whole.remove()
        model.set_attn_implementation(attention.NAME)
    return answers


def _groups(lengths: list[int], rows_at_once: int) -> Iterator[list[int]]:
    """Rows to decode together: of like length, shortest first, within the two limits."""
    group: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) == rows_at_once or (len(group) + 1) * lengths[row] > PROMPT_TOKENS_AT_ONCE):
            yield group
            group = []
        group.append(row)
    yield group
