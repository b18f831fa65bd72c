"""Run files: what is read, and the sentence for everything that can be wrong with one."""

import random
import re
from pathlib import Path

import pytest

from gatewright.spec.errors import RunFileError
from gatewright.spec.keys import run_keys
from gatewright.spec.read import read_run
from gatewright.spec.run import Adapter, Parallel, Run

GOOD = """\
run: judge-35b                     # also the folder: runs/judge-35b
model: {path: Qwen/Qwen3.6-35B-A3B, dtype: bfloat16}
method: {kind: sft, adapter: {rank: 32, alpha: 64, targets: [attention, experts]}, quantize: none}
data: {train: data/judge.jsonl, max_tokens: p99, overlong: error, pack: true}
train: {tokens_per_step: 131_072, steps: 2000, lr: 2e-4, schedule: cosine, betas: [0.9, 0.95], eps: 1e-8}
router: {train: false, balance: 0.0, z: 0.0, capacity: dropless, guard: {action: [lower_lr, freeze, rollback]}}
parallel: {ep: 8, dense: zero2, cp: dynamic}
hardware: {gpu: mi250x-gcd, per_node: 8, nodes: 4}
cluster: {kind: slurm, partition: standard-g, time_limit: 24h, links: 6, gate: {step: 25}}
"""

SMALL = """\
run: a
model:
  path: m
data:
  train: d.jsonl
train:
  tokens_per_step: 1024
  steps: 10
  lr: 1e-3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str | bytes, *overrides: str) -> Run:
    path = Path("run.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_run(path, overrides)


def complaint(text: str | bytes, *overrides: str) -> str:
    with pytest.raises(RunFileError) as caught:
        read(text, *overrides)
    return str(caught.value)


# --- what is read ---------------------------------------------------------------------------------------------


def test_a_full_run_file_is_read(folder: Path) -> None:
    run = read(GOOD)
    assert run.run == "judge-35b"
    assert run.folder == Path("runs/judge-35b")
    assert run.method.adapter == Adapter(rank=32, alpha=64.0, targets=["attention", "experts"])
    assert run.train.tokens_per_step == 131072
    assert run.train.betas == (0.9, 0.95)
    assert run.parallel == Parallel(ep=8, dense="zero2", cp="dynamic")
    assert run.data.max_tokens == "p99"
    assert run.evaluate is None


@pytest.mark.parametrize(
    ("written", "value"),
    [("2e-4", 2e-4), ("1e-5", 1e-5), ("1E+2", 100.0), (".5", 0.5), ("3", 3.0), ("0x10", 16.0), ("1_000", 1000.0)],
)
def test_numbers_are_read_as_a_person_means_them(folder: Path, written: str, value: float) -> None:
    lr = read(SMALL, f"train.lr={written}").train.lr
    assert lr == value
    assert type(lr) is float


@pytest.mark.parametrize("text", ["2024-01-01", "12:30:45", "0o17", "1e5x", "a b", "y", "é", "p99"])
def test_a_text_stays_the_text_that_was_written(folder: Path, text: str) -> None:
    assert read(SMALL, f"data.train={text}").data.train == text


def test_overrides_go_over_the_file_and_later_over_earlier(folder: Path) -> None:
    run = read(GOOD, "train.lr=1e-5", "train.steps=null", "train.epochs=2", "train.epochs=3", "track=[wandb]")
    assert (run.train.lr, run.train.steps, run.train.epochs, run.track) == (1e-5, None, 3, ["wandb"])


def test_an_override_makes_the_section_it_needs(folder: Path) -> None:
    run = read(SMALL, "method.adapter.rank=8", "evaluate.data=held-out.jsonl", "parallel.ep=2")
    assert run.method.adapter == Adapter(rank=8)
    assert run.evaluate is not None
    assert run.evaluate.data == "held-out.jsonl"
    assert run.parallel == Parallel(ep=2)


def test_an_override_can_hold_a_whole_section(folder: Path) -> None:
    assert read(GOOD, "method.adapter={rank: 4}").method.adapter == Adapter(rank=4)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(folder: Path) -> None:
    assert read(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode()) == read(SMALL)


# --- what is wrong --------------------------------------------------------------------------------------------


def test_every_mistake_is_listed_at_once_in_the_order_of_the_file(folder: Path) -> None:
    text = """\
run: a b
model:
  path: m
  dtype: bf16
method:
  adapter: {rank: "8", targets: experts}
data:
  train: 5
  pack: yes
train:
  tokens_per_step: 1e6
  steps: ten
  learning_rate: 1e-4
"""
    assert complaint(text, "train.lrr=1", "data.max_tokens=p101") == (
        "11 mistakes in run.yaml:\n"
        "  run.yaml:1: run: got a b, wanted a text such as judge-35b (Name of the run: letters, digits, dot, dash and"
        " underscore; the first is a letter or a digit)\n"
        "  run.yaml:4: model.dtype: got bf16, wanted float32 or bfloat16; did you mean bfloat16?\n"
        '  run.yaml:6: method.adapter.rank: got "8", wanted a whole number above 0; remove the quotes\n'
        "  run.yaml:6: method.adapter.targets: got experts, wanted a list of attention, mlp, experts,"
        " shared_experts, router, embedding or head or a text such as *.q_proj; write [experts]\n"
        '  run.yaml:8: data.train: got 5, wanted a text that is not empty; put it in quotes: "5"\n'
        "  run.yaml:9: data.pack: got yes, wanted true or false; write true\n"
        "  run.yaml:11: train.tokens_per_step: got 1e6, wanted a whole number above 0; write 1000000\n"
        "  run.yaml:12: train.steps: got ten, wanted a whole number above 0 or null\n"
        "  run.yaml:13: train.learning_rate: unknown key; here it is train.lr (Peak learning rate)\n"
        "  --set train.lrr=1: unknown key; did you mean lr?\n"
        "  --set data.max_tokens=p101: data.max_tokens: got p101, wanted a whole number above 0 or a text such as"
        " p99 or p100 (Longest document: a number, or a percentile of the data itself such as p99. p100 keeps all)"
    )


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("runn: b", "run.yaml:10: runn: unknown key; did you mean run?"),
        ("lr: 1e-4", "run.yaml:10: lr: unknown key here; did you mean train.lr?"),
        ("learning-rate: 1", "run.yaml:10: learning-rate: unknown key; here it is train.lr (Peak learning rate)"),
        ("train.lr: 1", "run.yaml:10: train.lr: unknown key; dots are for --set: write lr inside the section train"),
        ("router: {ballance: 1}", "run.yaml:10: router.ballance: unknown key; did you mean balance?"),
        ("parallel: {epp: 2}", "run.yaml:10: parallel.epp: unknown key; did you mean ep?"),
        ("cluster: {gate: {zzz: 2}}", "run.yaml:10: cluster.gate.zzz: unknown key; cluster.gate knows step"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(folder: Path, key: str, sentence: str) -> None:
    assert complaint(f"{SMALL}{key}\n") == sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.clip_norm=-1", "got -1, wanted a number above 0 or null"),
        ("train.betas=[0.9]", "got a list of 1, wanted a list of 2, each a number from 0 to 1"),
        ("train.betas=[0.9, 2]", "got 2, wanted a number from 0 to 1"),
        ("train.lr=.nan", "got .nan, wanted a number above 0"),
        ("train.lr=1e999", "got 1e999, wanted a number above 0"),
        ("train.lr=true", "got true, wanted a number above 0"),
        ("train.seed=010", "got 010, wanted a whole number at least 0"),
        ("train.lr=", "got nothing, wanted a number above 0"),
        ("data.pack=1", "got 1, wanted true or false"),
        ('data.pack="true"', 'got "true", wanted true or false'),
        ("data.pack=off", "got off, wanted true or false; write false"),
        ("data.max_tokens=0", "got 0, wanted a whole number above 0 or a text such as p99 or p100"),
        ("model.path=", "got nothing, wanted a text that is not empty"),
        ('model.path=""', 'got "", wanted a text that is not empty'),
        ("run=35", 'got 35, wanted a text such as judge-35b; put it in quotes: "35"'),
        ("run=no", 'no is a switch to some readers of YAML and a text to others; write "no"'),
        (
            "parallel=manual",
            "got manual, wanted a section (keys: ep, dense, dp_replicate, cp, exchange, probe, ...) or auto",
        ),
        ("router=", "this section is empty; write a key below it, or take it away"),
        ("model=path:x", "got path:x, wanted a section (keys: path, dtype, trust_remote_code); a space must follow"),
        ("train.schedule=[cosine]", "got a list of 1, wanted cosine, linear, constant or wsd"),
        ("cluster.time_limit=90", "got 90, wanted a text such as 90m, 24h or 2d"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_wanted(folder: Path, override: str, sentence: str) -> None:
    said = complaint(SMALL, override)
    assert said.startswith(f"--set {override}: ")
    assert sentence in said
    assert "\n" not in said


@pytest.mark.parametrize("key", [key for key in run_keys() if key and "*" not in key])
def test_every_key_refuses_what_it_cannot_hold_in_our_own_words(folder: Path, key: str) -> None:
    for wrong in ("{zz: [1]}", "[[]]", "-1.5"):
        said = complaint(SMALL, f"{key}={wrong}")
        assert f"--set {key}={wrong}: {key}" in said
        assert not re.search(r"pydantic|Input should|Value error|validation error|http|None", said), said


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("model:\n  path: m\n", "run.yaml: model: this section is missing; it needs path"),
        ("run: a\n", "run.yaml: run: missing; wanted a text such as judge-35b (Name of the run"),
        ("  lr: 1e-3\n", "run.yaml:6: train.lr: missing; wanted a number above 0 (Peak learning rate)"),
        ("  path: m\n", "run.yaml:2: model: this section is empty; it needs path"),
        ("  steps: 10\n", "run.yaml:6: train: steps and epochs are both missing; give one of them"),
    ],
)
def test_what_is_missing_is_named(folder: Path, missing: str, sentence: str) -> None:
    said = complaint(SMALL.replace(missing, ""))
    assert said.startswith(sentence)
    assert "\n" not in said


def test_steps_and_epochs_are_one_too_many(folder: Path) -> None:
    sentence = "train: steps and epochs are both given; keep one (null takes the other away)"
    assert complaint(SMALL, "train.epochs=2") == f"run.yaml:6: {sentence}"
    assert read(SMALL, "train.epochs=2", "train.steps=null").train.epochs == 2


def test_a_key_written_twice_is_an_error(folder: Path) -> None:
    said = complaint(SMALL + "model: {path: x, dtype: float32, path: y}\n")
    assert said == (
        "2 mistakes in run.yaml:\n"
        "  run.yaml:10: model: written twice, first at run.yaml:2\n"
        "  run.yaml:10: model.path: written twice, first at run.yaml:10"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "run.yaml is empty; wanted sections such as run:, model:, data: and train:"),
        ("# nothing\n", "run.yaml is empty;"),
        ("- run: a\n", "run.yaml holds a list of 1; wanted sections"),
        ("hello\n", "run.yaml holds only 'hello'; wanted sections"),
        ("run: a\nmodel:\n\tpath: m\n", "run.yaml:3: not valid YAML: a tab; YAML takes spaces only\n    3 | →path: m"),
        ("run: a\nmodel: {path: m\ndata: {}\n", "run.yaml:2: not valid YAML: the '{' is not closed"),
        ("run: a\nmodel:\n  path: x\n dtype: y\n", "run.yaml:4: not valid YAML: this line's indentation fits no"),
        ("run: a\nmodel:path\ndata: b\n", "run.yaml:2: not valid YAML: a space must follow the ':'"),
        ("run:a\nmodel:\n  path: x\n", "run.yaml:1: not valid YAML: a space must follow the ':'"),
        ('run: "a\n', "run.yaml:1: not valid YAML: the quote is not closed"),
        ("run: @a\n", "run.yaml:1: not valid YAML: text that begins with this character needs quotes"),
        ("run: a\x01\n", "run.yaml:1: a control character (0x01); remove it"),
        ("run: !!python/object:os.system x\n", "run.yaml:1: the tag !!python/object:os.system is not read"),
        ("run: a\n---\nrun: b\n", "run.yaml:2: a second document begins here"),
        ('{"a": 1}\n{"a": 2}\n', "run.yaml:2: not valid YAML: text after the end of the document"),
        ("[" * 5000, "run.yaml:1: nested more than 12 levels deep"),
        ("? [a]\n: b\n", "run.yaml:1: a key must be a word"),
        (b"run: \xff\n", "run.yaml:1: byte 0xff is not UTF-8; save the run file as UTF-8 text"),
        (SMALL.encode("utf-16"), "run.yaml:1: byte 0xff is not UTF-8"),
    ],
)
def test_a_text_that_is_no_run_file_is_told_so(folder: Path, text: str | bytes, sentence: str) -> None:
    assert complaint(text).startswith(sentence)


def test_an_alias_bomb_is_refused_before_it_grows(folder: Path) -> None:
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)]
    text = "\n".join(["a0: &a0 [lol]", *levels])
    assert complaint(text).startswith("run.yaml:1: anchors (&) and aliases (*) are not read")
    assert complaint("run: *a\n").startswith("run.yaml:1: anchors (&) and aliases (*) are not read")


def test_a_file_over_one_mebibyte_is_refused(folder: Path) -> None:
    assert complaint("#" * 2**20 + "\n").startswith("run.yaml is larger than 1 MiB")


def test_a_missing_file_names_the_nearest(folder: Path) -> None:
    Path("demo.yaml").write_text(SMALL)
    with pytest.raises(RunFileError, match=r"^demo\.yml: no such file; did you mean demo\.yaml\?$"):
        read_run(Path("demo.yml"))
    with pytest.raises(RunFileError, match=r"^other\.yaml: no such file$"):
        read_run(Path("other.yaml"))
    with pytest.raises(RunFileError, match=r"^no/a\.yaml: no such file \(nor a folder no\)$"):
        read_run(Path("no/a.yaml"))


def test_a_folder_is_no_run_file(folder: Path) -> None:
    Path("runs").mkdir()
    Path("runs/run.yaml").write_text(SMALL)
    with pytest.raises(RunFileError, match=r"^runs is a folder; wanted a run file \(YAML\); it holds run\.yaml$"):
        read_run(Path("runs"))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.lr", "wanted section.key=value, such as --set train.lr=1e-4"),
        ("=3", "wanted section.key=value, such as --set train.lr=1e-4"),
        ("trian.lr=3", "unknown key; did you mean train?"),
        ("train.lrr=3", "unknown key; did you mean lr?"),
        ("lr=3", "unknown key here; did you mean train.lr?"),
        ("learning_rate=3", "unknown key; here it is train.lr (Peak learning rate)"),
        ("train..lr=3", "unknown key; train knows tokens_per_step, "),
        ("track.0=wandb", "track is no section; set it whole, wanted a list of tensorboard, wandb, mlflow or trackio"),
        ("track.*=wandb", "track is no section; set it whole, wanted a list of tensorboard, wandb, mlflow or trackio"),
        ("data.train=[", "not valid YAML: a value is missing, or a '[' or '{' is not closed"),
        ("data.train=*a", "anchors (&) and aliases (*) are not read; write the value, or quote a text"),
    ],
)
def test_a_wrong_override_is_told_with_its_own_text(folder: Path, override: str, sentence: str) -> None:
    said = complaint(SMALL, override)
    assert said.startswith(f"--set {override}: {sentence}")
    assert "\n" not in said


def test_a_long_list_of_mistakes_is_cut(folder: Path) -> None:
    said = complaint(SMALL + "".join(f"zzz{number}: 1\n" for number in range(50)))
    assert said.startswith("50 mistakes in run.yaml:\n")
    assert said.endswith("\n  ... and 30 more")
    assert len(said.splitlines()) == 22


def test_a_damaged_file_never_gives_anything_but_our_error(folder: Path) -> None:
    """Three hundred small damages to a good file: it is read, or refused with a place."""
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        text = list(SMALL + GOOD[GOOD.index("router") :])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 2)] = rng.choice(list("{}[]:,-#&*!|>'\"%@`?\t\n \\~0e.é\x00\ud7ff"))
        try:
            read("".join(text))
        except RunFileError as error:
            refused += 1
            assert "run.yaml" in str(error)
            assert not re.search(r"pydantic|Input should|Value error", str(error)), str(error)
    assert refused > 150
