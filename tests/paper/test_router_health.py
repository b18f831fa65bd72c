"""Health from counts: the numbers of small cases by hand, and how much a probe can say of an expert without tokens."""

import math

import numpy as np
import pytest

from gatewright.router.health import LEAST_EVIDENCE, count_health, evidence, evidence_tokens, variance_inflation


def test_an_even_layer_is_perfect_and_a_collapsed_one_is_not() -> None:
    health = count_health([[5, 5, 5, 5], [20, 0, 0, 0]])
    assert health.load_cv == pytest.approx([0.0, math.sqrt(3)])
    assert health.max_violation == pytest.approx([0.0, 3.0])
    assert health.effective_experts == pytest.approx([1.0, 0.25])
    assert health.dead == [0, 3]
    assert health.starved == [0, 3]


def test_starved_is_under_a_tenth_of_the_fair_share() -> None:
    """Fair is 100; an expert with 10 has a tenth of it, not less."""
    assert count_health([[190, 101, 99, 10]]).starved == [0]
    assert count_health([[191, 101, 99, 9]]).starved == [1]


def test_a_layer_without_tokens_has_only_dead_experts() -> None:
    health = count_health([[0, 0, 0]])
    assert (health.load_cv, health.dead, health.starved, health.effective_experts) == ([0.0], [3], [3], [0.0])


def test_independent_tokens_have_no_inflation_and_topical_documents_have_much() -> None:
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.ones(16))
    independent = draw.multinomial(512, shares, size=400)
    assert variance_inflation(independent) == pytest.approx(1.0, abs=0.05)
    topical = np.stack([draw.multinomial(512, draw.dirichlet(20 * shares)) for _ in range(400)])
    # Dirichlet-multinomial: 1 + (n - 1) / (20 + 1).
    assert variance_inflation(topical) == pytest.approx(1 + 511 / 21, rel=0.1)


def test_inflation_needs_two_documents() -> None:
    assert variance_inflation(np.array([[3, 4]])) is None
    assert variance_inflation(np.array([[3, 4], [0, 0]])) is None


def test_enough_tokens_are_just_enough() -> None:
    tokens = evidence_tokens(top_k=8, experts=128, inflation=20.0)
    assert tokens == 3200
    assert evidence(tokens, top_k=8, experts=128, inflation=20.0) == LEAST_EVIDENCE
    assert evidence(tokens - 1, top_k=8, experts=128, inflation=20.0) < LEAST_EVIDENCE
