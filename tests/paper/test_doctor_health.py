"""The health of a run is read from its step lines, in the forms of four trainers."""

import io
import json
import math
import random

from gatewright.doctor.diagnosis import Diagnosis, diagnose


def doctor(lines: list[str]) -> Diagnosis:
    return diagnose([], stdin=io.BytesIO("\n".join(lines).encode()))


def hf(loss: object, *, grad: object = 0.5, lr: float = 1e-4) -> str:
    return str({"loss": loss, "grad_norm": grad, "learning_rate": lr, "epoch": 0.1})


def ours(step: int, **changed: object) -> str:
    event = {
        "v": 1, "time": "2026-01-01", "kind": "step", "step": step, "loss": 2.0, "lr": 1e-4, "grad_norm": 0.5,
        "tokens": 1000, "target_tokens": 900, "micro_batches": 1, "step_s": 1.0, "data_s": 0.01, "forward_s": 0.3,
        "backward_s": 0.6, "optimizer_s": 0.09, "memory_bytes": 1, "dropped_tokens": 0, "expert_tokens": [[250] * 4],
    }  # fmt: skip
    return json.dumps(event | changed)


def names(found: Diagnosis) -> list[str]:
    return [one.name for one in found.health]


def test_a_good_run_of_each_trainer_is_healthy_and_its_progress_is_read() -> None:
    noise = random.Random(0)
    losses = [2.0 + noise.gauss(0, 0.05) - step / 400 for step in range(200)]
    megatron = (
        " iteration {:8d}/     500 | consumed samples: 9 | elapsed time per iteration (ms): 2500.0 | "
        "learning rate: 1E-04 | global batch size: 8 | lm loss: {:.4E} | loss scale: 1.0 | grad norm: 0.5 |"
    )
    bar = " 40%|████      | 200/500 [06:40<10:00,  2.00s/it]"
    logs = {
        "huggingface": ([*(hf(round(loss, 4)) for loss in losses), bar], 200, 2.0),
        "megatron": ([megatron.format(step + 1, loss) for step, loss in enumerate(losses)], 200, 2.5),
        "gatewright": ([ours(step + 1, loss=loss) for step, loss in enumerate(losses)], 200, 1.0),
    }
    for tool, (lines, step, step_s) in logs.items():
        found = doctor(lines)
        assert (found.verdict, found.tool, names(found)) == ("healthy", tool, []), tool
        assert found.progress is not None
        assert (found.progress.step, round(found.progress.step_s, 3)) == (step, step_s), tool
        assert math.isclose(found.progress.loss_last, 1.5, abs_tol=0.15)
        if tool != "gatewright":
            assert found.progress.remaining_s == 300 * step_s


def test_newer_trainers_print_the_numbers_as_text() -> None:
    found = doctor([hf(f"{2 - step / 100:.4g}", grad="0.5") for step in range(20)])
    assert found.progress is not None and math.isclose(found.progress.loss_last, 1.83, abs_tol=0.01)


def test_loss_and_gradient_spikes_are_counted_with_the_worst() -> None:
    noise = random.Random(1)
    lines = [hf(round(2 + noise.gauss(0, 0.05), 4), grad=round(0.5 + noise.random() / 10, 3)) for _ in range(100)]
    lines[60], lines[80] = hf(9.0, grad=40.0), hf(6.0, grad=0.5)
    found = doctor(lines)
    assert names(found) == ["loss-spikes", "gradient-spikes"]
    spikes, gradients = found.health
    assert (spikes.occurrences, spikes.places[0].line) == (2, 61)
    assert gradients.number["largest"] == 40.0


def test_slowing_down_waiting_for_data_and_dropped_tokens_are_told() -> None:
    lines = [ours(step, step_s=1.0 + step / 50, data_s=0.3, dropped_tokens=7) for step in range(1, 101)]
    assert names(doctor(lines)) == ["slower-and-slower", "waiting-for-data", "dropped-tokens"]


def test_experts_out_of_balance_are_told_with_the_starved_ones() -> None:
    lines = [ours(step, expert_tokens=[[250] * 4, [960, 20, 20, 0]]) for step in range(1, 21)]
    (found,) = doctor(lines).health
    assert found.name == "experts-out-of-balance"
    assert found.number == {"worst_ratio": 3.84, "starved_experts": 1}


def test_zero_loss_or_gradient_in_a_row_is_a_failure_and_a_single_one_is_not() -> None:
    good = [hf(1.5)] * 20
    zero = doctor([*good, *[hf(0.0, grad=1.41)] * 5])
    assert zero.root is not None and (zero.root.name, zero.root.kind, zero.root.places[0].line) == (
        "loss-zero", "loss_zero_grad", 21,
    )  # fmt: skip
    flat = doctor([*good, *[hf(1.5, grad=0.0, lr=0.0)] * 5])
    assert flat.root is not None and flat.root.name == "gradient-zero"
    assert doctor([*good, hf(0.0), *good]).findings == ()


def test_nan_behind_a_filtered_zero_is_nan() -> None:
    found = doctor([hf(1.5)] * 5 + ["{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05}"] * 5)
    assert found.root is not None and found.root.kind == "loss_nan"


def test_a_very_long_run_is_thinned_and_its_end_is_not_lost() -> None:
    found = doctor([hf(round(3 - step / 30_000, 5)) for step in range(60_000)])
    assert found.progress is not None and math.isclose(found.progress.loss_last, 1.0, abs_tol=0.01)


def test_events_that_are_not_ours_or_are_cut_off_do_no_harm() -> None:
    lines = [
        ours(1),
        ours(2)[:80],
        '{"kind": "step"}',
        '{"kind": "step", "step": "x"}',
        '{"kind": "step", "loss": 1e999}',
        "{",
    ]
    assert doctor(lines).verdict == "healthy"
