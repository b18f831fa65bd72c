"""`gatewright plan` as a person uses it: questions in words and run files, answers in every form, and mistakes."""

import importlib.util
import json
import math
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_run import whole_run, write_run
from test_cli import Shell, shell  # noqa: F401

from gatewright.planner.catalogue import find_model
from gatewright.planner.job import Job
from gatewright.report.plan_text import WIDTH

BIG = ("Qwen3-235B-A22B", "--gpu", "h200", "--gpus", "8", "--rank", "32", "--targets", "attention,experts")
RUN = """\
run: judge
model: {path: Qwen/Qwen3-30B-A3B}
method: {adapter: {rank: 32, targets: [attention, experts]}}
data: {train: data/judge.jsonl}
train: {tokens_per_step: 131072, micro_batch_tokens: 8192, steps: 2000, lr: 2.0e-4, checkpointing: full}
hardware: {gpu: h200, per_node: 8}
"""
DENSE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def planned(shell: Shell):  # type: ignore[no-untyped-def]  # noqa: F811
    """Runs `gatewright plan`, which must succeed in silence, and gives what it printed."""

    def run(*arguments: str) -> str:
        done = shell("plan", *arguments)
        assert (done.code, done.err) == (0, "")
        return done.out

    return run


def decent(text: str) -> bool:
    """No line is wide, and no number on screen is none."""
    return max(map(len, text.splitlines())) <= WIDTH and not re.search(r"\bnan\b|\binf\b|(^|\s)-\d", text, re.I)


# --- answers --------------------------------------------------------------------------------------------------


def test_a_question_in_words_is_answered_in_the_first_line(planned) -> None:  # type: ignore[no-untyped-def]
    text = planned(*BIG, "--method", "lora", "--tokens", "8192", "--hours", "72", "--price", "4.54", "--explain")
    assert re.match(r"fits: 8 × h200, \d+\.\d GiB of 139\.7 at the [a-z ]+, \d+\.\d GiB head-room\n", text)
    assert "2,615 $ for 72.0 h × 8 GPUs × 4.54 $" in text
    assert "235.09 B parameters" in text and "5.03 B parameters train" in text and " × 8 B" in text
    assert decent(text)


def test_a_run_file_is_planned_with_its_overrides(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    (shell.folder / "run.yaml").write_text(RUN)
    text = planned("run.yaml", "--set", "hardware.gpu=mi300x", "--set", "train.steps=1000", "--price", "2")
    assert text.startswith("fits: 8 × mi300x, ") and "8 GPUs × 2.00 $ (given by you)" in text
    fixed = planned("run.yaml", "--set", "parallel={ep: 8, dense: zero2}")
    assert "layout    8 × h200: ep 8, dp 8 zero2" in fixed and "also fits" not in fixed
    assert planned("run.yaml", "--gpus", "2").startswith("fits: 2 × h200, ")


def test_json_holds_the_same_figures_as_the_page(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    document = json.loads(planned(*BIG, "--storage", "fp8", "--hours", "72", "--json", "--html", "plan.html"))
    assert document["fits"] and document["gpus"] == 8 and document["trainable_parameters"] == 5_029_953_536
    page = (shell.folder / "plan.html").read_text(encoding="utf-8")
    device = document["chosen"]["memory"]["device"]["bytes"] / 2**30
    assert f"{device:.1f} GiB" in page and page.startswith("<!doctype html>")
    assert "http" not in re.sub(r"http-equiv", "", page), "nothing is fetched"
    assert {"load", "loss", "backward", "step", "save"} == {p["name"] for p in document["chosen"]["memory"]["phases"]}


def test_methods_are_compared_side_by_side(planned) -> None:  # type: ignore[no-untyped-def]
    text = planned("Qwen3-30B-A3B", "--gpu", "h200", "--gpus", "1", "--compare", "lora,qlora,full", "--hours", "10")
    assert text.startswith("fits: lora, qlora; not full, on 1 × h200\n")
    assert "too large" in text and decent(text)
    plans = json.loads(planned("Qwen3-8B", "--gpu", "h200", "--gpus", "1", "--compare", "full,lora", "--json"))
    assert [plan["method"].split()[0] for plan in plans] == ["full", "LoRA"]


def test_without_a_gpu_every_kind_is_tried(planned) -> None:  # type: ignore[no-untyped-def]
    text = planned("Qwen3-30B-A3B", "--method", "qlora")
    assert re.match(r"fits: on \d+ of \d+ kinds of GPU; \d+ × [a-z0-9-]+ costs least an hour, [\d.]+ \$\n", text)
    assert decent(text)
    rows = {row["gpu"]: row for row in json.loads(planned("Qwen3-30B-A3B", "--json"))}
    assert rows["h200"]["gpus"] == 1 and rows["h200"]["usd_per_hour"] > 0


def test_what_does_not_fit_says_what_would(planned) -> None:  # type: ignore[no-untyped-def]
    text = planned("DeepSeek-V4-Pro", "--gpu", "h200", "--gpus", "4")
    assert re.match(r"does not fit: 4 × h200, [\d.]+ GiB of 136\.9 usable at the backward pass; 8 would do\n", text)
    assert decent(text)


def test_modules_narrow_the_targets(planned) -> None:  # type: ignore[no-untyped-def]
    text = planned("Qwen3-235B-A22B", "--gpu", "h200", "--storage", "fp8", "--rank", "32", "--modules", "q_proj,v_proj")
    assert (
        text.startswith("fits: 2 × h200, ")
        and "LoRA rank 32 on q_proj, v_proj;" in text
        and "50.82 M parameters train" in text
    )


def test_the_picture_is_a_png_and_its_library_is_asked_for_by_name(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    if importlib.util.find_spec("PIL") is None:
        done = shell("plan", "Qwen3-8B", "--gpu", "h200", "--png", "plan.png")
        assert done.code == 2 and 'pip install "gatewright[plot]"' in done.err
        return
    planned("Qwen3-8B", "--gpu", "h200", "--png", "plan.png")
    raw = (shell.folder / "plan.png").read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    assert raw.startswith(b"\x89PNG\r\n\x1a\n") and (width, height) == (2000, 756)


def test_without_pillow_nothing_is_written(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['PIL'] = None\nfrom gatewright.cli import main\n"
        "sys.argv = ['gatewright', 'plan', 'Qwen3-8B', '--gpu', 'h200', '--png', 'a.png', '--html', 'a.html']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and 'pip install "gatewright[plot]"' in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_measured_run_replaces_the_assumed_efficiency(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    events = [event | ({"device": "NVIDIA H200"} if event["kind"] == "start" else {}) for event in whole_run(total=40)]
    folder = write_run(shell.folder / "runs" / "judge", events)
    (folder / "run.yaml").write_text(RUN + "parallel: {ep: 8, dense: zero2}\n")
    text = planned(*BIG, "--calibrate", "runs/judge")
    assert re.search(
        r"measured by runs/judge: median of 37 steps, \d+\.\d\d s for [\d,]+ tokens", " ".join(text.split())
    )
    assert "published at" not in text and decent(text)


def test_exact_bytes_come_from_the_headers_of_a_checkpoint(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    folder = shell.folder / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE))
    assert "as stored" not in planned("tiny", "--gpu", "h200")
    tensors = checkpoint(dtype="F8_E4M3")
    write_safetensors(folder / "model.safetensors", tensors)
    text = planned("tiny", "--gpu", "h200", "--explain")
    document = json.loads(planned("tiny", "--gpu", "h200", "--json"))
    weights = document["chosen"]["memory"]["phases"][0]["parts"][0]
    assert weights["name"] == "frozen weights" and weights["bytes"] == sum(size for _, _, size in tensors)
    assert "as stored" in text and f"{len(tensors)} tensors in 1 files" in text and decent(text)


def checkpoint(*, dtype: str) -> list[tuple[str, list[int], int]]:
    """Name, shape and bytes of each tensor of DENSE, matrices of blocks in one byte a weight."""
    del dtype
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [256, 64], "lm_head.weight": [256, 64]}
    for layer in range(2):
        block = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
            "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64],
            "mlp.down_proj": [64, 128], "input_layernorm": [64], "post_attention_layernorm": [64],
            "self_attn.q_norm": [16], "self_attn.k_norm": [16],
        }.items():  # fmt: skip
            shapes[f"{block}.{name}.weight"] = shape
    shapes["model.norm.weight"] = [64]
    return [(name, shape, math.prod(shape) * (1 if "proj" in name else 2)) for name, shape in shapes.items()]


def write_safetensors(path: Path, tensors: list[tuple[str, list[int], int]]) -> None:
    header, offset = {}, 0
    for name, shape, size in tensors:
        dtype = "F8_E4M3" if size == math.prod(shape) else "BF16"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


# --- mistakes -------------------------------------------------------------------------------------------------

H200 = ("--gpu", "h200")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("Qwen3-30B-A3", *H200), "Nearest in the catalogue: Qwen3-30B-A3B"),
        (("Qwen3-8B", "--gpu", "h2000"), "Nearest: h200"),
        (("Qwen3-8B", *H200, "--gpus", "0"), "gpus 0: wanted a whole number from 1"),
        (("Qwen3-8B", *H200, "--gpus", "-4"), "gpus -4: wanted"),
        (("Qwen3-8B", *H200, "--gpus", "1000000000"), "gpus 1,000,000,000: wanted"),
        (("Qwen3-8B", *H200, "--tokens", "0"), "tokens 0: wanted"),
        (("Qwen3-8B", *H200, "--tokens", "9" * 400), "wanted a whole number"),
        (("Qwen3-8B", *H200, "--document-tokens", "-1"), "document_tokens -1: wanted"),
        (("Qwen3-8B", *H200, "--hours", "nan"), "hours nan: wanted a number above 0"),
        (("Qwen3-8B", *H200, "--hours", "-1"), "hours -1: wanted"),
        (("Qwen3-8B", *H200, "--hours", "1e300"), "hours 1e+300: wanted"),
        (("Qwen3-8B", *H200, "--price", "inf"), "price inf: wanted"),
        (("Qwen3-8B", *H200, "--hours", "1", "--steps", "1"), "give one of them"),
        (("Qwen3-8B", *H200, "--method", "lroa"), "Nearest: lora"),
        (("Qwen3-8B", *H200, "--compare", "lora,qlroa"), "Nearest: qlora"),
        (("Qwen3-8B", *H200, "--compare", ","), "--compare is empty"),
        (("Qwen3-8B", *H200, "--checkpointing", "ful"), "Nearest: full"),
        (("Qwen3-8B", *H200, "--framework", "torchtain"), "Nearest known: 'torchtitan'"),
        (("Qwen3-8B", *H200, "--backend", "megatrn"), "Nearest: megatron"),
        (("Qwen3-8B", *H200, "--storage", "fp7"), "Nearest: fp8"),
        (("Qwen3-8B", *H200, "--targets", "atention"), "Nearest: attention"),
        (("Qwen3-8B", *H200, "--targets", "experts"), "has no experts to adapt; it has: attention, mlp"),
        (("Qwen3-8B", *H200, "--modules", "q_prj"), "Nearest: q_proj"),
        (("Qwen3-30B-A3B", *H200, "--gpus", "8", "--parallel", "ep=3"), "use one of 1, 2, 4, 8"),
        (("Qwen3-8B", *H200, "--gpus", "8", "--parallel", "ep=8"), "is dense and has no experts to divide; use ep 1"),
        (("Qwen3-8B", *H200, "--gpus", "8", "--parallel", "eq=8"), "Nearest: ep"),
        (("Qwen3-8B", *H200, "--gpus", "8", "--parallel", "ep=0"), "such as ep=8"),
        (("Qwen3-8B", *H200, "--gpus", "8", "--parallel", "dense=zero4"), "Nearest: zero3"),
        (("Qwen3-8B", *H200, "--parallel", "ep=1"), "give --gpus too"),
        (("Qwen3-8B", *H200, "--set", "train.lr=1"), "--set changes a run file"),
        (("Qwen3-8B", "--html", "a.html"), "a question without --gpu does not go with --html"),
        (("run.yaml", "--rank", "8"), "write --set method.adapter.rank=... instead"),
        (("run.yaml", "--set", "hardware.gpus=8"), "hardware.gpus"),
        (("rum.yaml",), "did you mean run.yaml?"),
        (("Qwen3-8B", *H200, "--calibrate", "runs/none"), "--calibrate wants the folder of a run"),
        (("Qwen3-8B", *H200, "--html", "."), "--html wants the file's own name"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_nothing_is_written(shell: Shell, arguments: tuple[str, ...], says: str) -> None:  # noqa: F811
    (shell.folder / "run.yaml").write_text(RUN)
    done = shell("plan", *arguments)
    assert done.code == 2 and done.out == "" and says in done.err
    assert done.err.startswith("error: ") and len(done.err.splitlines()) == 1
    assert [path.name for path in shell.folder.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_truncated_config_or_header_is_named(shell: Shell, cut: int) -> None:  # noqa: F811
    folder = shell.folder / "cut"
    folder.mkdir()
    whole = json.dumps(DENSE)
    (folder / "config.json").write_text(whole[: min(cut, len(whole) - 1)])
    done = shell("plan", "cut", *H200)
    assert done.code == 2 and "config.json" in done.err and "Traceback" not in done.err
    (folder / "config.json").write_text(whole)
    write_safetensors(folder / "model.safetensors", checkpoint(dtype="F8_E4M3"))
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:cut])
    done = shell("plan", "cut", *H200)
    assert done.code == 2 and "model.safetensors is cut off" in done.err


def test_a_config_of_ten_gigabytes_is_not_read(shell: Shell) -> None:  # noqa: F811
    huge = shell.folder / "config.json"
    with huge.open("wb") as file:
        file.truncate(10 * 10**9)
    done = shell("plan", "config.json", *H200)
    assert done.code == 2 and "config.json" in done.err and len(done.err) < 400


def test_weights_of_another_model_are_noticed(shell: Shell) -> None:  # noqa: F811
    folder = shell.folder / "mixed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DENSE | {"intermediate_size": 12800}))
    write_safetensors(folder / "model.safetensors", checkpoint(dtype="F8_E4M3"))
    done = shell("plan", "mixed", *H200)
    assert done.code == 2 and "they are not of one model" in done.err


def test_random_questions_are_answered_or_refused_in_words(shell: Shell) -> None:  # noqa: F811
    """Numbers at the edges, and words that do not go together: never a traceback, never a nonsense number."""
    draw = random.Random(0)
    numbers = ["0", "-1", "1", "3", "7", "8", "64", "4096", "100000", "99999999999"]
    options = {
        "--gpus": ["1", "2", "3", "8", "24", "0"], "--rank": numbers, "--tokens": numbers,
        "--document-tokens": numbers, "--tokens-per-step": numbers, "--steps": numbers, "--hours": ["0", "1e-9", "72"],
        "--price": ["0", "1e-5", "999"], "--method": ["lora", "qlora", "full"], "--per-node": numbers,
        "--targets": ["attention", "experts", "mlp,attention", ""], "--checkpointing": ["none", "full", "alternate"],
        "--attention": ["eager", "flash"], "--optimizer": ["adamw_8bit", "muon", "sgd"],
        "--framework": ["trl", "megatron", "unsloth"], "--backend": ["deepspeed", "megatron", "fsdp1"],
        "--storage": ["nf4", "bf16", "mxfp4"],
    }  # fmt: skip
    ends = set()
    for _ in range(60):
        chosen = draw.sample(sorted(options), draw.randint(1, 5))
        words = [word for name in chosen for word in (name, draw.choice(options[name]))]
        model = draw.choice(["Qwen3-0.6B", "OLMoE-1B-7B-0924", "gpt-oss-20b", "gemma-2-2b"])
        done = shell("plan", model, "--gpu", draw.choice(["h200", "l4", "mi250x-gcd"]), *words)
        ends.add(done.code)
        said = " ".join(["plan", model, *words])
        assert done.code in (0, 2), said + done.err
        assert (done.code == 0) == (done.err == ""), said
        assert done.code == 2 or decent(done.out), said + done.out
    assert ends == {0, 2}


# --- speed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "unloaded"),
    [
        (BIG, {"torch", "transformers", "numpy", "yaml", "gatewright.probe"}),
        (("run.yaml",), {"torch", "transformers", "numpy", "gatewright.probe"}),
    ],
)
def test_a_plan_loads_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...], unloaded: set[str]) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    code = (
        f"import sys\nsys.argv = ['gatewright', 'plan', *{arguments}]\nfrom gatewright.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nprint('LOADED', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.rpartition("LOADED")[2].split()) & unloaded == set()


def test_the_catalogue_answers_for_a_config_too(shell: Shell, planned) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    """The same question by name and by config.json has the same answer, but for the name."""
    (shell.folder / "config.json").write_text(json.dumps(dict(find_model("Qwen3-30B-A3B").config)))
    by_name, by_file = planned("Qwen3-30B-A3B", *H200), planned("config.json", *H200)
    assert by_name.splitlines()[0] == by_file.splitlines()[0]
    assert Job.__dataclass_fields__.keys() >= {"stored"}
