"""Whether the capacity estimate keeps its bound on held-out documents, and the i.i.d. formula does not.

A tiny byte-level Qwen3-MoE learns Python from the standard library's sources; its routing on other sources is recorded;
half of these documents give the capacity factor, the other half are routed with it. A few minutes on one CPU core.

    python benchmarks/router_capacity.py [--record FILE.npz]
"""

import argparse
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gatewright.data.view import DocumentView
from gatewright.model.attention import choose_kernel
from gatewright.model.load import load_model
from gatewright.router.blocks import RoutingRecord, write_record
from gatewright.router.capacity import Question, estimate_capacity
from gatewright.router.drop import drop_share
from gatewright.spec import run as spec
from gatewright.train.record_routing import record_routing

STEPS, ROWS, CONTEXT = 500, 4, 256
LEARNING_RATE, BALANCE = 2e-3, 0.01
DOCUMENTS, DOCUMENT_TOKENS = 80, 8192
DROP = 0.01
QUESTIONS = [
    Question(tokens=256, drop=DROP),
    Question(tokens=1024, drop=DROP),
    Question(tokens=8192, drop=DROP),
    Question(tokens=8192, documents=4, drop=DROP),
    Question(tokens=8192, documents=8, drop=DROP),
    Question(tokens=8192, ep=4, per="rank", drop=DROP),
    Question(tokens=8192, ep=8, per="rank", drop=DROP),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="also write the routing record there")
    record_file = parser.parse_args().record
    torch.manual_seed(0)
    torch.set_num_threads(1)
    began = time.process_time()
    sources = python_sources()
    counted = [text for text in sources if len(text) >= DOCUMENT_TOKENS][:DOCUMENTS]
    learnt = [text for text in sources if text not in counted]
    model = tiny_moe()
    loss = train(model, learnt)
    print(f"trained {STEPS} steps on {len(learnt)} files: {loss:.2f} nats a byte, {time.process_time() - began:.0f} s")
    record = record_texts(model, [text[:DOCUMENT_TOKENS] for text in counted])
    if record_file:
        write_record(record, record_file)
    print(f"recorded {record.documents} documents of {DOCUMENT_TOKENS:,} tokens, {time.process_time() - began:.0f} s")
    for line in table(record):
        print(line)


def table(record: RoutingRecord) -> Iterator[str]:
    """One line a question: the factor, and the drop that it really gives on the documents that it was not made from."""
    yield f"largest mean drop in any layer on held-out documents, wanted ≤ {DROP:.1%}; short: from 1,024 tokens of each"
    yield "tokens  n  per      estimate        short           i.i.d."
    for question in QUESTIONS:
        yield " ".join(
            [f"{question.tokens:>6} {question.documents:>2}", f"{question.per:<6} {question.ep}"]
            + [f"{factor:6.2f} -> {drop:5.2%}" for factor, drop in outcomes(record, question)]
        )


def outcomes(record: RoutingRecord, question: Question) -> list[tuple[float, float]]:
    """(factor, worst layer's held-out drop) for the estimate, the estimate from short runs, and the i.i.d. formula.

    The mean over both ways of taking one half of the documents for the other.
    """
    numbers = np.unique(record.document)
    halves = [record.only(numbers[::2]), record.only(numbers[1::2])]
    results = []
    for known, held_out in (halves, halves[::-1]):
        estimate, short = estimate_capacity(known, question), estimate_capacity(shortened(known, 1024), question)
        factors = (estimate.upper, short.upper, estimate.independent)
        results.append([(factor, realised_drop(held_out, question, factor)) for factor in factors])
    return [
        (float(np.mean([one[0], two[0]])), float(np.mean([one[1], two[1]]))) for one, two in zip(*results, strict=True)
    ]


def shortened(record: RoutingRecord, tokens: int) -> RoutingRecord:
    """The record as if each document were only a piece of so many tokens, from a drawn place in it."""
    draw, blocks = np.random.default_rng(2), tokens // record.block_tokens
    first = {
        number: draw.integers((record.document == number).sum() - blocks + 1) for number in np.unique(record.document)
    }
    start = np.array([first[number] for number in record.document])
    kept = (record.block >= start) & (record.block < start + blocks)
    return replace(
        record,
        document=record.document[kept],
        block=(record.block - start)[kept],
        tokens=record.tokens[kept],
        counts=record.counts[kept],
    )


def realised_drop(record: RoutingRecord, question: Question, factor: float, *, pools: int = 2000) -> float:
    """Mean share dropped in the layer that drops most, over pools of runs drawn from the record's documents.

    Written out pool by pool, apart from the estimator's own drawing.
    """
    draw = np.random.default_rng(1)
    groups, blocks = question.groups(record.experts), question.tokens // record.block_tokens
    documents = [counts for counts in record.whole_blocks() if len(counts) >= blocks]
    drops = np.zeros(len(record.layers))
    for _ in range(pools):
        total_LE = np.zeros(record.counts.shape[1:], np.int64)
        for _ in range(question.pool):
            counts = documents[draw.integers(len(documents))]
            start = draw.integers(len(counts) - blocks + 1)
            total_LE += counts[start : start + blocks].sum(axis=0)
        drops += drop_share(total_LE.reshape(len(drops), groups, -1).sum(axis=2), factor)
    return float((drops / pools).max())


# --- the model and its documents ------------------------------------------------------------------------------------


def python_sources() -> list[bytes]:
    """The standard library's own files, tests among them, in a fixed drawn order; not what is installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)
    random.Random(0).shuffle(files)
    return [text for text in (file.read_bytes() for file in files) if len(text) > 1024]


def record_texts(model: PreTrainedModel, texts: Sequence[bytes]) -> RoutingRecord:
    """The routing of these texts, equally long, read CONTEXT tokens at a time: the model never saw longer rows."""
    pieces = [text[start : start + CONTEXT] for text in texts for start in range(0, len(text), CONTEXT)]
    record = record_routing(
        model, as_view(pieces), range(len(pieces)), batch_tokens=DOCUMENT_TOKENS, device=torch.device("cpu")
    )
    blocks = len(texts[0]) // record.block_tokens
    number = np.arange(len(record.block))
    return replace(record, document=number // blocks, block=number % blocks)


def as_view(texts: Sequence[bytes]) -> DocumentView:
    """One document a text, one token a byte."""
    lengths = np.array([len(text) for text in texts])
    return DocumentView(
        lengths=lengths, starts_N=np.cumsum(lengths) - lengths, rows_N=np.arange(len(texts)),
        max_tokens=int(lengths.max()), overlong_documents=0, tokens_lost=0, untrained_documents=0,
        target_tokens=int(lengths.sum()), tokens_T=np.frombuffer(b"".join(texts), np.uint8),
        is_target_T=np.ones(int(lengths.sum()), bool),
    )  # fmt: skip


def tiny_moe() -> PreTrainedModel:
    """4 layers of 16 experts, two chosen; 128 wide; random weights; with both of our seams."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        moe_intermediate_size=128, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=DOCUMENT_TOKENS, tie_word_embeddings=True, pad_token_id=None, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        kernel = choose_kernel(device, torch.float32)
        return load_model(spec.Model(path=folder, dtype="float32"), device=device, kernel=kernel)


def train(model: PreTrainedModel, texts: Sequence[bytes]) -> float:
    """Trains all weights with AdamW and a balance loss a layer; returns the last cross-entropy, nats a byte."""
    stream = torch.from_numpy(np.frombuffer(b"".join(texts), np.uint8).astype(np.int64))
    model.requires_grad_(True)
    model.train()
    model.set_attn_implementation("sdpa")  # rows of one length: no boundary inside a row
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    logits_L = watch_routers(model)
    draw = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, (STEPS - step) / 80)
        starts = torch.randint(len(stream) - CONTEXT - 1, (ROWS,), generator=draw)
        rows = torch.stack([stream[start : start + CONTEXT] for start in starts.tolist()])
        logits_L.clear()
        loss = model(input_ids=rows, labels=rows).loss
        (loss + BALANCE * balance_loss(logits_L)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.set_attn_implementation("gatewright")
    model.requires_grad_(False)
    return loss.item()


def watch_routers(model: PreTrainedModel) -> list[Tensor]:
    """A list that each router adds its logits [T, E] to."""
    seen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    return seen


def balance_loss(logits_L: Sequence[Tensor]) -> Tensor:
    """Mean over layers of E Σ f·P: 1 when balanced."""
    losses = []
    for logits_TE in logits_L:
        experts = logits_TE.shape[1]
        chosen = logits_TE.topk(2, dim=-1).indices
        share_E = torch.bincount(chosen.flatten(), minlength=experts) / chosen.numel()
        losses.append(experts * (share_E * logits_TE.softmax(dim=-1).mean(dim=0)).sum())
    return torch.stack(losses).mean()


if __name__ == "__main__":
    main()
