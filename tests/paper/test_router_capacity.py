"""The capacity estimate: exact where it can be, and kept on documents it was not made from, where i.i.d. is not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gatewright.router.blocks import RoutingRecord, read_record
from gatewright.router.capacity import Question, estimate_capacity, estimate_drop
from gatewright.router.capacity_fit import SharesByLength, fit_variance
from gatewright.router.drop import drop_share, independent_factor, smallest_factor
from gatewright.spec.errors import DataError, UserError

RECORDED = Path(__file__).with_name("routing_python.npz")
"""How it was made: routing_python.md."""


def made_record(counts_RLE: np.ndarray, *, documents: int, top_k: int, block_tokens: int) -> RoutingRecord:
    blocks = len(counts_RLE) // documents
    return RoutingRecord(
        document=np.repeat(np.arange(documents), blocks),
        block=np.tile(np.arange(blocks), documents),
        tokens=np.full(len(counts_RLE), block_tokens),
        counts=counts_RLE,
        layers=tuple(range(3, 3 + counts_RLE.shape[1])),
        top_k=top_k,
        block_tokens=block_tokens,
    )


def topical_record(*, documents: int, blocks: int = 16, concentration: float = 20.0, seed: int = 0) -> RoutingRecord:
    """Every document has its own shares, drawn around even ones; its tokens are independent given these."""
    draw = np.random.default_rng(seed)
    shares = draw.dirichlet(np.full(8, concentration / 8), size=documents)
    counts = np.concatenate([draw.multinomial(128, share, size=blocks) for share in shares])
    return made_record(counts[:, None], documents=documents, top_k=2, block_tokens=64)


def shortened(record: RoutingRecord, blocks: int) -> RoutingRecord:
    """The record as if each document were a piece of so many blocks, from a drawn place in it."""
    _, index, sizes = np.unique(record.document, return_inverse=True, return_counts=True)
    start = np.random.default_rng(2).integers(sizes - blocks + 1)[index]
    kept = (record.block >= start) & (record.block < start + blocks)
    return replace(
        record,
        document=record.document[kept],
        block=(record.block - start)[kept],
        tokens=record.tokens[kept],
        counts=record.counts[kept],
    )


def realised_drop(record: RoutingRecord, question: Question, factor: float, *, pools: int = 400) -> float:
    """Mean share dropped in the layer that drops most, routing pools of the record's documents one by one."""
    draw = np.random.default_rng(1)
    groups, blocks = question.groups(record.experts), question.tokens // record.block_tokens
    documents = record.whole_blocks()
    drops = np.zeros(len(record.layers))
    for _ in range(pools):
        total_LE = np.zeros(record.counts.shape[1:], np.int64)
        for _ in range(question.pool):
            counts = documents[draw.integers(len(documents))]
            start = draw.integers(len(counts) - blocks + 1)
            total_LE += counts[start : start + blocks].sum(axis=0)
        drops += drop_share(total_LE.reshape(len(drops), groups, -1).sum(axis=2), factor)
    return float((drops / pools).max())


# --- acceptance, on a real router's counts --------------------------------------------------------------------------


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    "question",
    [
        Question(tokens=256),
        Question(tokens=8192),
        Question(tokens=8192, documents=4),
        Question(tokens=8192, ep=8, per="rank"),
        Question(tokens=8192, ep=4, per="rank", drop=0.003),
    ],
    ids=lambda q: f"{q.tokens}x{q.documents}-{q.per}{q.ep}-{q.drop}",
)
def test_the_bound_holds_on_other_documents_and_the_iid_formula_breaks_it(question: Question, half: int) -> None:
    record = read_record(RECORDED)
    numbers = np.unique(record.document)
    known, held_out = record.only(numbers[half::2]), record.only(numbers[1 - half :: 2])
    estimate = estimate_capacity(known, question)
    short = estimate_capacity(shortened(known, 8), question)
    assert (estimate.method, estimate.documents, estimate.longest_tokens) == ("bootstrap", 40, question.tokens)
    assert realised_drop(held_out, question, estimate.upper) <= 1.5 * question.drop
    assert short.method == ("fit" if question.tokens > 1024 else "bootstrap")
    assert realised_drop(held_out, question, short.upper) <= 1.5 * question.drop
    assert realised_drop(held_out, question, estimate.independent) > 1.5 * question.drop


def test_longer_contexts_need_almost_as_much_room_and_larger_pools_need_less() -> None:
    record = read_record(RECORDED)
    short, long = (estimate_capacity(record, Question(tokens=tokens)).factor for tokens in (256, 8192))
    pooled = estimate_capacity(record, Question(tokens=8192, documents=8)).factor
    assert 0.8 * short < long <= short, "32 times as long"
    assert pooled < 0.7 * long
    assert independent_factor(groups=16, assignments=8192 * 2, drop=0.01) < 1.01


def short_documents(record: RoutingRecord) -> RoutingRecord:
    """Each document cut to 2 to 11 blocks, so that lengths differ."""
    numbers = np.unique(record.document)
    blocks = dict(zip(numbers.tolist(), np.random.default_rng(3).integers(2, 12, size=len(numbers)), strict=True))
    kept = record.block < np.array([blocks[number] for number in record.document.tolist()])
    return replace(
        record,
        document=record.document[kept],
        block=record.block[kept],
        tokens=record.tokens[kept],
        counts=record.counts[kept],
    )


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    "question",
    [Question(tokens=4096, packed=True), Question(tokens=2048, packed=True, ep=4, per="rank")],
    ids=["expert", "rank"],
)
def test_the_bound_holds_for_packs_of_other_documents(question: Question, half: int) -> None:
    """Packs filled document by document, apart from the estimator's own drawing."""
    record = short_documents(read_record(RECORDED))
    numbers = np.unique(record.document)
    estimate = estimate_capacity(record.only(numbers[half::2]), question)
    tokens, counts = record.only(numbers[1 - half :: 2]).whole_documents()
    draw, drops = np.random.default_rng(1), np.zeros((2, 4))
    for _ in range(400):
        total_LE, room = np.zeros(counts.shape[1:], np.int64), question.tokens * question.pool
        while tokens[number := draw.integers(len(tokens))] <= room:
            total_LE += counts[number]
            room -= tokens[number]
        grouped = total_LE.reshape(4, question.groups(16), -1).sum(axis=2)
        drops += [drop_share(grouped, factor) for factor in (estimate.upper, estimate.independent)]
    assert (estimate.method, estimate.documents) == ("packs", 40)
    assert drops[0].max() / 400 <= 1.5 * question.drop
    assert drops[1].max() / 400 > 1.5 * question.drop


def test_a_long_pack_needs_little_more_than_the_floor_however_it_is_drawn() -> None:
    """Just under and just over the number of documents from which on it is fixed."""
    record = short_documents(read_record(RECORDED))
    mean = record.whole_documents()[0].mean()
    under, over = (
        estimate_capacity(record, Question(tokens=int(mean * documents), packed=True)) for documents in (490, 510)
    )
    assert under.factor == pytest.approx(over.factor, rel=0.01)
    assert over.floor <= over.factor <= 1.02 * over.floor


# --- small cases that can be known ----------------------------------------------------------------------------------


def test_the_factor_is_the_exact_root_of_the_drop() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        pools, groups = draw.integers(1, 20), draw.integers(1, 12)
        loads = draw.dirichlet(np.full(groups, 0.5), size=pools) * groups
        weights = draw.dirichlet(np.ones(pools))
        drop = float(draw.uniform(0.001, 0.5))
        factor = smallest_factor(loads, drop=drop, weights_R=weights)
        dropped = (np.clip(loads - factor, 0, None).mean(axis=1) * weights).sum()
        assert dropped == pytest.approx(drop, rel=1e-9)


def test_independent_tokens_get_the_iid_factor() -> None:
    draw = np.random.default_rng(0)
    counts = draw.multinomial(128, np.full(8, 1 / 8), size=(60 * 4, 1))
    record = made_record(counts, documents=60, top_k=2, block_tokens=64)
    estimate = estimate_capacity(record, Question(tokens=256, drop=0.005))
    assert estimate.independent == pytest.approx(estimate.factor, abs=0.01)
    assert estimate.upper < estimate.factor + 0.03
    assert (estimate.layer, estimate.floor) == (3, pytest.approx(1.0, abs=0.02))


def test_documents_with_a_topic_need_the_same_room_at_any_length() -> None:
    """Shares are beta distributed with variance (1/8 · 7/8) / 21: hundreds of times that of independent tokens."""
    record = topical_record(documents=400)
    seen, beyond = (estimate_capacity(record, Question(tokens=tokens)) for tokens in (1024, 65536))
    assert (seen.method, beyond.method) == ("bootstrap", "fit")
    assert beyond.factor == pytest.approx(seen.factor, rel=0.03)
    assert seen.factor > 2 > seen.independent


def test_the_fit_finds_the_law_that_made_the_numbers() -> None:
    lengths = 2.0 ** np.arange(6)
    fitted = fit_variance(lengths, 0.0084 + 0.02 * lengths**-0.5)
    assert (fitted.tau2, fitted.a, fitted.beta) == pytest.approx((0.0084, 0.02, 0.5), rel=1e-3)
    pure = fit_variance(lengths, 0.02 * lengths**-1.0)
    assert pure(64.0) == pytest.approx(0.02 / 64, rel=1e-6)
    assert fit_variance(lengths, np.zeros(6))(1000.0) == 0.0


def test_the_variance_by_length_is_that_of_the_drawn_documents() -> None:
    record = topical_record(documents=500)
    lengths, sums = SharesByLength([counts[:, 0] for counts in record.whole_blocks()]).variances(np.arange(500))
    topic = 8 * (1 / 8 * 7 / 8) / 21
    within = [8 * (1 / 8 * 7 / 8) * (20 / 21) / (128 * length) for length in lengths]
    assert lengths.tolist() == [1, 2, 4, 8, 16]
    assert sums == pytest.approx([topic + rest for rest in within], rel=0.05)


def test_floors_and_bounds_are_in_order() -> None:
    record = topical_record(documents=60)
    questions = [Question(tokens=512, documents=n, drop=d) for d in (0.01, 0.05) for n in (1, 4, 64)]
    estimates = [estimate_capacity(record, question) for question in questions]
    for estimate in estimates:
        assert estimate.floor <= estimate.factor <= estimate.upper
    for mild, strict in zip(estimates[3:], estimates[:3], strict=True):
        assert mild.factor < strict.factor
    assert estimates[0].factor > estimates[1].factor > estimates[2].factor
    assert estimates[2].factor == pytest.approx(estimates[2].floor, rel=0.1)


def test_rank_groups_are_contiguous_experts_and_one_rank_needs_no_more_than_all() -> None:
    counts = np.array([[[30, 30, 2, 2]]] * 40)
    record = made_record(counts, documents=20, top_k=1, block_tokens=64)
    per_rank = estimate_capacity(record, Question(tokens=64, ep=2, per="rank"))
    assert per_rank.factor == pytest.approx(60 / 32 - 0.01 * 2, abs=1e-9)
    assert estimate_capacity(record, Question(tokens=64, ep=1, per="rank")).factor == pytest.approx(0.99)


def test_the_same_question_has_the_same_answer() -> None:
    record, question = topical_record(documents=30), Question(tokens=512, documents=3)
    assert estimate_capacity(record, question) == estimate_capacity(record, question)


def test_a_factor_drops_what_the_estimate_says() -> None:
    record, question = topical_record(documents=60), Question(tokens=512, drop=0.02)
    estimate = estimate_capacity(record, question)
    drop, endless = estimate_drop(record, question, estimate.factor)
    assert drop == pytest.approx(0.02, rel=1e-9)
    assert endless <= 0.02
    assert estimate_drop(record, question, estimate.floor)[1] == pytest.approx(0.02, rel=1e-9)
    assert estimate_drop(record, question, estimate.independent)[0] == pytest.approx(estimate.independent_drop)
    assert estimate_drop(record, question, 8.0) == (0.0, 0.0)
    with pytest.raises(UserError, match="factor = 0; wanted more than 0"):
        estimate_drop(record, question, 0.0)


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drop": 0.0}, "drop = 0; wanted a share above 0"),
        ({"drop": 1.0}, "drop = 1; wanted"),
        ({"tokens": 0}, "tokens = 0; wanted at least 1"),
        ({"ep": -2}, "ep = -2; wanted at least 1"),
        ({"documents": 0}, "documents = 0"),
        ({"documents": 2, "packed": True}, "documents = 2: a pack holds as many documents as fit"),
    ],
)
def test_a_question_without_sense_is_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Question(**{"tokens": 512} | changes)


def test_an_ep_that_does_not_divide_the_experts_names_those_that_do() -> None:
    with pytest.raises(UserError, match="ep = 3 does not divide 8 experts; use one of 1, 2, 4, 8"):
        estimate_capacity(topical_record(documents=30), Question(tokens=512, ep=3))


def test_too_few_documents_are_refused_with_what_is_there() -> None:
    record = topical_record(documents=30, blocks=3)
    with pytest.raises(DataError, match=r"too few documents: 0 of 30 have 4,096 tokens, and fewer than 20 have 256"):
        estimate_capacity(record, Question(tokens=4096))
    with pytest.raises(DataError, match=r"too few documents: 5 of 5 have 512"):
        estimate_capacity(topical_record(documents=5), Question(tokens=512))
    with pytest.raises(UserError, match="tokens = 63: routing was recorded in blocks of 64; wanted as many"):
        estimate_capacity(record, Question(tokens=63))
