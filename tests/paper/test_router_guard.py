"""The guard on synthetic looks: silent while the router is well, one action at a time when it is not."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from router_looks import COLLAPSE, EXPERTS, START, TOP_K, look, mild

from gatewright.router.guard import (
    ANSWERS,
    GuardState,
    decide,
    due,
    in_force,
    remember,
    state_from_json,
    state_to_json,
)
from gatewright.router.verdict import RANK, Verdict, judge
from gatewright.spec.event import GuardActed, RouterHealth
from gatewright.spec.run import Guard, Router

ACTIONS = ["lower_lr", "freeze", "balance", "bias", "rollback", "reset", "stop"]


def verdict(*looks: RouterHealth, guard: Guard | None = None, inflation: float | None = None) -> Verdict:
    return judge(guard or Guard(), START, looks, top_k=TOP_K, experts=EXPERTS, inflation=inflation)


def run_guard(
    router: Router, looks: list[RouterHealth], state: GuardState | None = None
) -> tuple[list[GuardActed], GuardState]:
    """What the trainer does at each look; the router's sickness takes its course whatever is done."""
    state = state or remember(GuardState(trains=router.train), START)
    acted = []
    for health in looks:
        state = remember(state, health)
        assert state.first is not None
        said = judge(router.guard, state.first, state.recent, top_k=TOP_K, experts=EXPERTS)
        event, state = decide(router, state, said)
        acted += [event] if event else []
    return acted, state


def router(*actions: str, **changes: object) -> Router:
    guard = Guard(action=list(actions), **{k.removeprefix("guard_"): v for k, v in changes.items() if "guard_" in k})
    return Router(guard=guard, **{"train": True} | {k: v for k, v in changes.items() if "guard_" not in k})


# --- the verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sign", "level"),
    [
        ({"kl": 0.31}, "yellow"),
        ({"overlap": 0.59}, "yellow"),
        ({"entropy": 0.62}, "yellow"),
        ({"starved": 3}, "orange"),
        ({"cv": 0.64}, "orange"),
        ({"dead": 1}, "red"),
    ],
)
def test_each_sign_has_its_level_when_two_looks_show_it(sign: dict[str, float], level: str) -> None:
    ill = look(50, **sign)
    assert verdict(look(25), ill).level == "green"
    assert not verdict(look(25), ill).clean
    both = verdict(look(25, **sign), ill)
    assert both.level == level
    assert len(both.reasons) == 1
    assert verdict(ill).level == "green"


@pytest.mark.parametrize("healthy", [{"kl": 0.29}, {"overlap": 0.61}, {"entropy": 0.63}, {"starved": 2}, {"cv": 0.63}])
def test_just_inside_the_limits_is_clean(healthy: dict[str, float]) -> None:
    said = verdict(look(25, **healthy), look(50, **healthy))
    assert (said.level, said.reasons, said.clean) == ("green", (), True)


def test_two_signs_that_take_turns_are_no_alarm() -> None:
    assert verdict(look(25, kl=0.4), look(50, overlap=0.5)).level == "green"


def test_the_worst_sign_gives_the_level_and_comes_first() -> None:
    said = verdict(*COLLAPSE[-2:])
    assert said.level == "red"
    assert said.reasons[0] == "5 experts that had tokens at step 0 have none (limit 1): 5 in layer 3"
    assert any(reason.startswith("KL of the routing from step 0 is 1.68 nats (limit 0.3)") for reason in said.reasons)
    assert "12 of 64 experts starve, at step 0 0 (limit 3 more)" in said.reasons


def test_a_probe_too_small_for_the_documents_it_holds_calls_no_expert_dead() -> None:
    """4,096 tokens promise a fair expert 512 assignments: worth 90 at inflation 5.7, but 3 at 168."""
    ill = (look(25, dead=2), look(50, dead=2))
    assert verdict(*ill).level == "red"
    assert verdict(*ill, inflation=51.0).level == "red"
    assert verdict(*ill, inflation=52.0).level == "green"
    few = (look(25, dead=2, tokens=400), look(50, dead=2, tokens=400))
    assert verdict(*few).level == "green"


def test_an_expert_that_was_dead_at_step_0_is_nobodys_fault_and_one_that_revives_hides_no_death() -> None:
    first = replace(START, dead=[0, 2, 0, 0], starved=[0, 2, 0, 0])
    same = replace(look(50), dead=[0, 2, 0, 0], starved=[0, 2, 0, 0])
    moved = replace(look(50), dead=[1, 1, 0, 0], starved=[1, 1, 0, 0])
    assert judge(Guard(), first, [same, same], top_k=TOP_K, experts=EXPERTS).clean
    said = judge(Guard(), first, [moved, moved], top_k=TOP_K, experts=EXPERTS, moe_layers=[1, 3, 5, 7])
    assert said.level == "red"
    assert said.reasons[0].endswith("1 in layer 1")


def test_a_router_whose_numbers_are_none_is_not_healthy() -> None:
    ill = look(50, kl=float("nan"))
    said = verdict(ill, ill)
    assert (said.level, said.clean, said.severity) == ("yellow", False, float("inf"))


# --- the decisions --------------------------------------------------------------------------------------------------


def test_the_measured_collapse_is_answered_before_the_first_expert_dies() -> None:
    acted, state = run_guard(router("lower_lr", "freeze", "rollback"), COLLAPSE)
    assert [(event.step, event.level, event.action) for event in acted] == [
        (30, "yellow", "lower_lr"),
        (50, "red", "freeze"),
        (100, "red", "rollback"),
    ]
    assert acted[0].detail == "router learning rate from 0.1 to 0.01 of train.lr"
    assert acted[2].detail.startswith("back to the newest checkpoint up to step 10, the last healthy one")
    assert state.healthy_step == 10


def test_an_orange_alarm_skips_what_answers_red_only_and_leaves_it_for_later() -> None:
    orange = [look(step, cv=0.7) for step in (25, 50)]
    red = [look(step, cv=0.7, dead=3) for step in (75, 100)]
    acted, _ = run_guard(router("rollback", "freeze", "stop"), orange + red)
    assert [event.action for event in acted] == ["freeze", "rollback"]


def test_a_yellow_router_is_acted_on_again_only_when_it_went_farther() -> None:
    """Lowering the learning rate cannot take back the distance from step 0."""
    stays = [look(25 * i, kl=0.4) for i in range(1, 9)]
    acted, state = run_guard(router("lower_lr", "lower_lr"), stays)
    assert [event.step for event in acted] == [50]
    acted, state = run_guard(router("lower_lr", "lower_lr"), [look(25 * i, kl=0.5) for i in (9, 10)], state)
    assert [event.step for event in acted] == [250]
    assert in_force(router("lower_lr", "lower_lr"), state).lr_scale == pytest.approx(0.1 * 0.1 * 0.1)


def test_an_orange_alarm_that_stays_gets_the_next_action_after_a_pause() -> None:
    acted, _ = run_guard(router("freeze", "bias"), [look(25 * i, cv=0.7) for i in range(1, 7)])
    assert [(event.step, event.action) for event in acted] == [(50, "freeze"), (100, "bias"), (150, "none")]


def test_with_nothing_to_do_each_level_is_told_of_once() -> None:
    acted, _ = run_guard(router(), COLLAPSE + COLLAPSE[-1:] * 3)
    assert [(event.step, event.level, event.action) for event in acted] == [
        (30, "yellow", "none"),
        (50, "red", "none"),
    ]
    acted, _ = run_guard(router(), [*COLLAPSE[:3], look(31), *COLLAPSE[2:4]])
    assert [event.level for event in acted] == ["yellow", "yellow"], "told again after it was well"


def test_a_frozen_router_is_neither_lowered_nor_frozen_nor_reset() -> None:
    red = [look(25 * i, dead=3) for i in range(1, 3)]
    acted, state = run_guard(router("lower_lr", "freeze", "reset", "balance", train=False), red)
    assert [event.action for event in acted] == ["balance"]
    assert not in_force(router(train=False), state).trains


def test_a_balance_loss_after_a_freeze_lets_the_router_train_again() -> None:
    ill = router("freeze", "balance", "freeze", "bias")
    looks = [look(25 * i, dead=3) for i in range(1, 9)]
    acted, state = run_guard(ill, looks[:2])
    assert not in_force(ill, state).trains
    acted, state = run_guard(ill, looks[2:4], state)
    assert acted[0].detail == ("weight of the balance loss from 0 to 0.01; the router trains again, at 0.1 of train.lr")
    assert in_force(ill, state).trains
    acted, state = run_guard(ill, looks[4:], state)
    now = in_force(ill, state)
    assert [event.action for event in acted] == ["freeze", "bias"]
    assert (now.trains, now.balance, now.bias_rate) == (False, 0.01, 0.01)


def test_an_action_never_takes_back_a_stronger_setting_of_the_run_file() -> None:
    strong = router("balance", "bias", balance=0.1, bias_rate=0.05)
    _, state = run_guard(strong, [look(25 * i, dead=3) for i in range(1, 5)])
    assert state.done == ("balance", "bias")
    assert (in_force(strong, state).balance, in_force(strong, state).bias_rate) == (0.1, 0.05)


def test_the_state_goes_through_json_and_the_guard_goes_on_as_if_nothing_had_happened() -> None:
    ill = router(*ACTIONS)
    whole, end = run_guard(ill, COLLAPSE)
    for cut in range(len(COLLAPSE)):
        before, state = run_guard(ill, COLLAPSE[:cut])
        again = state_from_json(json.loads(json.dumps(state_to_json(state))))
        assert again == state
        after, state = run_guard(ill, COLLAPSE[cut:], again)
        assert (before + after, state) == (whole, end)


@pytest.mark.parametrize("every", [1, 2, 10, 25, 100])
def test_looks_are_closer_in_the_beginning_and_never_miss_a_regular_one(every: int) -> None:
    guard = Guard(every_steps=every)
    steps = [step for step in range(6 * every + 1) if due(guard, step=step)]
    assert steps[0] == 0
    assert {every * i for i in (2, 3, 4, 5, 6)} <= set(steps)
    assert steps[-4:] == [every * i for i in (3, 4, 5, 6)]
    if every == 25:
        assert steps[:6] == [0, 10, 20, 30, 40, 50]


# --- properties, on many drawn courses ------------------------------------------------------------------------------


def drawn_course(draw: random.Random) -> list[RouterHealth]:
    steps = draw.randint(1, 30)
    wild = lambda low, high: draw.uniform(low, high)  # noqa: E731
    return [
        look(
            10 * i, kl=wild(0, 1), overlap=wild(0.4, 1), entropy=wild(0.3, 0.8), cv=wild(0.3, 0.9),
            starved=draw.randint(0, 6), dead=draw.randint(0, 2), tokens=draw.choice([100, 4096]),
        )
        for i in range(1, steps + 1)
    ]  # fmt: skip


def test_a_healthy_router_is_left_alone() -> None:
    draw = random.Random(0)
    for _ in range(300):
        healthy = [
            look(
                10 * i, kl=draw.uniform(0, 0.299), overlap=draw.uniform(0.601, 1), entropy=draw.uniform(0.63, 0.9),
                cv=draw.uniform(0.2, 0.63), starved=draw.randint(0, 2),
            )
            for i in range(1, 30)
        ]  # fmt: skip
        acted, state = run_guard(router(*ACTIONS), healthy)
        assert acted == []
        assert state.healthy_step == 290


def test_one_bad_look_between_good_ones_is_left_alone() -> None:
    draw = random.Random(1)
    for _ in range(100):
        looks = [mild(draw.choice(COLLAPSE), share=float(i % 2)) for i in range(20)]
        assert run_guard(router(*ACTIONS), looks)[0] == []


def test_any_course_is_answered_in_order_with_pauses_and_within_the_list() -> None:
    draw = random.Random(2)
    for _ in range(300):
        listed = [draw.choice(ACTIONS) for _ in range(draw.randint(0, 5))]
        ill = router(*listed, train=draw.random() < 0.8)
        course = drawn_course(draw)
        acted, state = run_guard(ill, course)
        steps = [event.step for event in acted]
        assert steps == sorted(set(steps)), "more than one event at a look"
        done = [event for event in acted if event.action != "none"]
        assert [event.action for event in done] == list(state.done)
        assert all(b.step - a.step >= 20 for a, b in pairwise(done)), "no pause of two looks"
        assert all(RANK[ANSWERS[event.action]] <= RANK[event.level] for event in done)
        assert all(listed.count(action) >= state.done.count(action) for action in ACTIONS)
        assert all(event.reasons for event in acted)
        assert state.healthy_step in {0} | {health.step for health in course}
        assert state_from_json(json.loads(json.dumps(state_to_json(state)))) == state
