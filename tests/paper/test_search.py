"""The layout search: complete, quick, and able to say why."""

import time

import pytest

from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.job import Adapter, Job, Layout
from gatewright.planner.plan import plan, which_gpus
from gatewright.planner.plan_run import plan_run
from gatewright.planner.search import Question, layouts_of, search, sizes
from gatewright.spec.errors import ModelError, UserError
from gatewright.spec.run import Run


def question(model: str = "Qwen3-30B-A3B", **fields: object) -> Question:
    job = Job(
        shape=find_shape(model), method="lora", adapter=Adapter(rank=16, roles=frozenset({"attention"})), loss="linear"
    )
    values = {"job": job, "gpu": find_gpu("h200"), "per_node": 8, "tokens_per_step": 65536, **fields}
    return Question(**values)  # type: ignore[arg-type]


def test_each_pipeline_stage_is_told_and_the_fullest_is_drawn() -> None:
    layout = Layout(ranks=8, sharding="zero1", pp=4)
    answer = plan(
        "Qwen3-8B", gpus=8, gpu="h200", method="full", framework="megatron", backend="megatron", layout=layout
    )
    [note] = [note for note in answer.notes if note.startswith("allocated by pipeline stage")]
    peaks = [float(text) for text in note.partition(": ")[2].split(", ")]
    assert answer.memory is not None
    assert len(peaks) == 4 and max(peaks) == pytest.approx(answer.memory.allocated.bytes / 2**30, abs=0.06)
    assert len(set(peaks)) > 1


def test_every_group_size_divides_the_ranks() -> None:
    layouts = list(layouts_of(question(), 12))
    assert len(layouts) == len(set(layouts))
    assert all(12 % layout.ep == 0 and 128 % layout.ep == 0 for layout in layouts)
    assert {layout.ep for layout in layouts} == {1, 2, 4}


def test_candidates_are_sorted_and_told_apart() -> None:
    found = search(question(), gpus=8)
    seconds = [item.time.step_s for item in found.fitting if item.time]
    assert found.best is not None and seconds[0] <= min(seconds) * 1.1
    assert all(item.refusals for item in found.illegal)
    assert all(item.memory and "GiB" in item.reasons[0] for item in found.too_large)


def test_the_search_over_64_gpus_takes_under_two_seconds() -> None:
    for backend, framework in (("gatewright", "gatewright"), ("megatron", "megatron")):
        begin = time.process_time()
        answer = plan(
            "Qwen3-235B-A22B", gpu="h200", gpus=64, rank=32, storage="fp8", backend=backend, framework=framework  # type: ignore[arg-type]
        )  # fmt: skip
        assert time.process_time() - begin < 2
        assert answer.fits and len(answer.alternatives) == 4


def test_a_fixed_layout_is_judged_alone() -> None:
    answer = plan("Qwen3-30B-A3B", gpu="h200", gpus=8, layout=Layout(ranks=8, ep=8))
    assert answer.chosen is not None and "ep 8" in answer.chosen.layout and not answer.alternatives


def test_what_does_not_fit_names_the_bytes_and_what_would_do() -> None:
    answer = plan("Qwen3-235B-A22B", gpu="h200", gpus=1, rank=32, storage="fp8")
    assert not answer.fits and answer.fewest_gpus == 2
    assert "frozen weights" in answer.rejected[0].reasons[0]


def test_which_gpus_hold_an_8b_adapter() -> None:
    fewest = {gpu.name: count for gpu, count in which_gpus(question("Qwen3-8B"))}
    assert fewest["h200"] == 1 and fewest["mi300x"] == 1 and fewest["mi250x-gcd"] == 1
    assert all(count is not None for count in fewest.values())


def test_a_run_file_is_planned_as_it_would_run() -> None:
    run = Run.model_validate(
        {
            "run": "judge",
            "model": {"path": "Qwen/Qwen3-30B-A3B"},
            "method": {"adapter": {"rank": 32, "targets": ["attention", "experts"]}},
            "data": {"train": "judge.jsonl", "max_tokens": 8192},
            "train": {"tokens_per_step": 131072, "steps": 2000, "lr": 2e-4, "checkpointing": "full"},
            "parallel": {"ep": 8, "dense": "zero2"},
            "hardware": {"gpu": "mi250x-gcd", "per_node": 8, "nodes": 2},
        }
    )
    answer = plan_run(run)
    assert answer.gpus == 16 and answer.chosen is not None and answer.chosen.layout.endswith("ep 8, dp 16 zero2")
    assert "8,192 tokens, 131,072 tokens a step" in answer.notes[0]
    assert answer.chosen.cost is not None and answer.chosen.cost.usd is not None
    with pytest.raises(UserError, match="no hardware section; add hardware"):
        plan_run(run.model_copy(update={"hardware": None}))


def test_sizes_are_every_number_in_a_node_then_whole_nodes() -> None:
    assert sizes(8, 40) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"gpus": 0}, "gpus 0: wanted a whole number"),
        ({"tokens": -1}, "tokens -1: wanted"),
        ({"rank": 0}, "rank 0: wanted"),
        ({"targets": ("expert",)}, "No target is called 'expert'. Nearest: experts. Known: attention"),
        ({"model": "Qwen3-8B", "targets": ("experts",)}, "has no experts to adapt; it has: attention, mlp"),
        ({"storage": "fp7"}, "No storage is called 'fp7'. Nearest: fp8. Known: bf16"),
        ({"framework": "torchtain"}, "unknown framework 'torchtain'. Nearest known: 'torchtitan'"),
        ({"hours": -1.0}, "hours -1: wanted a number above 0"),
        ({"price": float("nan")}, "price nan: wanted a number above 0"),
        ({"gpu": "h2000"}, "Nearest: h200"),
        ({"model": "Qwen3-30B-A3"}, "Nearest in the catalogue: Qwen3-30B-A3B"),
    ],
)
def test_bad_input_is_one_sentence_with_the_nearest_choice(fields: dict[str, object], says: str) -> None:
    values = {"model": "Qwen3-30B-A3B", "gpu": "h200", "gpus": 8, **fields}
    with pytest.raises((UserError, ModelError)) as caught:
        plan(values.pop("model"), **values)  # type: ignore[arg-type]
    assert says in str(caught.value)
