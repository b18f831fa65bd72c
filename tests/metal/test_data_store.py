"""The token store: the renderer's tokens, written once and whole, reused by content, limited as a view; and batches."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers_made import make_tokenizer

from gatewright.data.batch import IGNORED
from gatewright.data.documents import read_rows
from gatewright.data.loader import Loader
from gatewright.data.store import build_store
from gatewright.data.template import Renderer
from gatewright.packing.epoch import EpochPlan
from gatewright.spec.errors import DataError, RunFailed

CHATML = (Path(__file__).parent / "chat_templates" / "chatml.jinja").read_text()


@pytest.fixture(scope="module")
def renderer():
    return Renderer(make_tokenizer(template=CHATML))


def chat(*texts: str) -> dict[str, object]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


ROWS = [
    chat("Hi", "Hello."),
    chat("A question that no one answers."),
    {"prompt": "The capital of France is", "completion": " Paris."},
    {"text": "The quick brown fox jumps over the lazy dog. " * 12},
    chat("Count.", "one two three four five six seven eight nine", "Again?", "No."),
]


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def build(source, renderer, *, vocab_size=1000):
    return build_store(source, renderer=renderer, root=source.parent / "tokens", vocab_size=vocab_size)


def test_holds_what_the_renderer_makes(source, renderer):
    store = build(source, renderer)
    documents = renderer.documents(list(read_rows(source)))
    assert len(store) == 5
    for row, document in enumerate(documents):
        begin, end = store.offsets_N1[row : row + 2]
        assert store.tokens_T[begin:end].tolist() == document.tokens
        assert store.is_target_T[begin:end].tolist() == document.is_target
        assert store.target_counts_N[row] == sum(document.is_target[1:])
        assert str(store.place(row)) == f"{source}:{row + 1}"
    assert store.tokens_T.dtype == np.uint16
    assert store.highest_token == max(max(document.tokens) for document in documents)
    wide = build(source, Renderer(make_tokenizer(template=CHATML + "{# other #}")), vocab_size=100_000)
    assert wide.tokens_T.dtype == np.uint32


def test_is_reused_for_the_same_content_under_any_name_and_date(source, renderer):
    first = build(source, renderer)
    written = (first.folder / "tokens.bin").stat().st_mtime_ns
    os.utime(source, (1, 1))
    assert build(source, renderer).folder == first.folder
    other = source.with_name("chat.v2.jsonl")
    source.rename(other)
    again = build(other, renderer)
    assert again.folder == first.folder and (again.folder / "tokens.bin").stat().st_mtime_ns == written
    assert again.source == str(other) and str(again.place(4)) == f"{other}:5"


def test_is_made_anew_for_other_content_template_or_tokenizer(source, renderer):
    stores = [build(source, renderer)]
    source.write_text(source.read_text().replace("Paris", "Rome"))
    stores.append(build(source, renderer))
    stores.append(build(source, Renderer(make_tokenizer(template=CHATML + " "))))
    stores.append(build(source, Renderer(make_tokenizer(template=CHATML, added=("<think>",)))))
    assert len({store.fingerprint for store in stores}) == len({store.folder for store in stores}) == 4


@pytest.mark.parametrize("damage", ["tokens.bin", "store.json"])
def test_a_damaged_store_is_made_again(source, renderer, damage):
    whole = build(source, renderer)
    tokens = whole.tokens_T.tolist()
    (whole.folder / damage).write_bytes((whole.folder / damage).read_bytes()[:-7])
    assert build(source, renderer).tokens_T.tolist() == tokens


def test_a_failure_leaves_nothing(source, renderer):
    with source.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"chat.jsonl:6: not JSON"):
        build(source, renderer)
    assert list((source.parent / "tokens").iterdir()) == []


def test_vocabulary_smaller_than_the_tokenizer(source, renderer):
    with pytest.raises(DataError, match=r"chat.jsonl:\d: the tokenizer gives token \d+ .*\(vocab_size = 300 in config"):
        build(source, renderer, vocab_size=300)
    build(source, renderer)
    with pytest.raises(DataError, match="do not belong together"):
        build(source, renderer, vocab_size=300)


def test_a_folder_that_may_not_be_written(source, renderer):
    (source.parent / "tokens").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"tokens cannot be written to .*; set runs_dir"):
        build(source, renderer)


def test_a_full_disk(source, renderer, small_disk):
    source.write_text((json.dumps(ROWS[3]) + "\n") * 3000)
    with pytest.raises(RunFailed, match=r"the disk of .* is full"):
        build_store(source, renderer=renderer, root=small_disk, vocab_size=1000)
    assert list(small_disk.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB; needs the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_left_overs_of_a_killed_process_are_removed(source, renderer):
    place = build(source, renderer).folder
    shutil.rmtree(place)
    host = os.uname().nodename
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    orphan = place.with_name(f".partial-{place.name}-{host}-{dead.stdout.strip()}")
    running = place.with_name(f".partial-{place.name}-{host}-{os.getppid()}")
    for folder in (orphan, running):
        folder.mkdir()
    build(source, renderer)
    assert not orphan.exists() and running.exists() and place.exists()


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_data_store import CHATML
from tokenizers_made import make_tokenizer
from gatewright.data.store import build_store
from gatewright.data.template import Renderer
renderer = Renderer(make_tokenizer(template=CHATML))
store = build_store(Path(sys.argv[1]), renderer=renderer, root=Path(sys.argv[2]), vocab_size=1000)
print(store.folder, int(store.tokens_T.astype(int).sum()))
"""


def test_two_processes_at_once(source):
    source.write_text((json.dumps(ROWS[3]) + "\n") * 300)
    arguments = [sys.executable, "-c", WRITER, str(source), str(source.parent / "tokens"), str(Path(__file__).parent)]
    both = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1]
    assert len(list((source.parent / "tokens").iterdir())) == 1


def test_nothing_to_learn(source, renderer):
    source.write_text(json.dumps(chat("Only a question.")) + "\n" + json.dumps({"text": ""}) + "\n")
    with pytest.raises(DataError, match="no token to learn in any of its 2 rows, so all labels are masked"):
        build(source, renderer).limit("p100", "error")


# Limits.


def test_all_rows_that_have_something_to_learn(source, renderer):
    store = build(source, renderer)
    view = store.limit("p100", "error")
    assert view.rows_N.tolist() == [0, 2, 3, 4]
    assert view.untrained_documents == 1
    assert view.lengths.tolist() == np.diff(store.offsets_N1)[[0, 2, 3, 4]].tolist()
    assert view.max_tokens == view.lengths.max()
    assert (view.overlong_documents, view.tokens_lost) == (0, 0)
    assert view.target_tokens == store.target_counts_N.sum()


def test_error_says_what_each_choice_costs(source, renderer):
    store = build(source, renderer)
    longest = int(np.diff(store.offsets_N1).max())
    with pytest.raises(DataError) as error:
        store.limit(20, "error")
    truncated, split, dropped = (store.limit(20, policy) for policy in ("truncate", "split", "drop"))
    text = str(error.value)
    assert (
        f"of 4 documents are longer than data.max_tokens = 20; the longest has {longest} tokens, at {source}:4" in text
    )
    assert f"truncate loses {truncated.tokens_lost} tokens" in text
    assert f"split {split.tokens_lost} targets" in text and f"drop {dropped.tokens_lost} tokens" in text
    with pytest.raises(DataError, match=r"data.max_tokens = p50 \(\d+ tokens\)"):
        store.limit("p50", "error")


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
@pytest.mark.parametrize("limit", [2, 5, 20, 40, 10_000])
def test_policies_against_their_definition(source, renderer, policy, limit):
    store = build(source, renderer)
    wanted, lost, left_out = [], 0, 1
    for row in (0, 2, 3, 4):
        begin, end = (int(edge) for edge in store.offsets_N1[row : row + 2])
        pieces = [(begin, end)]
        if end - begin > limit:
            if policy == "drop":
                lost += end - begin
                continue
            pieces = [(a, min(a + limit, end)) for a in range(begin, end, limit)]
            if policy == "truncate":
                pieces = pieces[:1]
            else:
                lost += sum(bool(store.is_target_T[a]) for a, _ in pieces[1:])
        kept = [(a, b) for a, b in pieces if b - a >= 2 and store.is_target_T[a + 1 : b].any()]
        left_out += not kept
        if policy == "truncate" and end - begin > limit:
            lost += end - begin - sum(b - a for a, b in kept)
        wanted += kept
    if not wanted:
        with pytest.raises(DataError, match=r"nothing to learn is left at data.max_tokens"):
            store.limit(limit, policy)
        return
    view = store.limit(limit, policy)
    assert [(int(s), int(s + n)) for s, n in zip(view.starts_N, view.lengths, strict=True)] == wanted
    assert view.tokens_lost == lost
    assert view.untrained_documents == left_out
    assert view.lengths.max() <= limit
    assert view.target_tokens == sum(int(store.is_target_T[a + 1 : b].sum()) for a, b in wanted)
    for number, (a, b) in enumerate(wanted):
        tokens, is_target = view.document(number)
        assert tokens.dtype == np.int64 and tokens.tolist() == store.tokens_T[a:b].tolist()
        assert is_target.tolist() == store.is_target_T[a:b].tolist()


@pytest.mark.parametrize("wrong", ["p101", "p9x", "99", "p"])
def test_percentiles_that_are_none(source, renderer, wrong):
    with pytest.raises(DataError, match="wanted a number of tokens, or a percentile"):
        build(source, renderer).limit(wrong, "drop")


# Batches.


def test_labels_never_cross_a_boundary(source, renderer):
    view = build(source, renderer).limit("p100", "error")
    plan = EpochPlan(view.lengths, capacity=int(view.lengths.max()), seed=3)
    loader = Loader(view=view, plan=plan, packs_per_step=2)
    seen = []
    for batch in (b for step in range(plan.packs_per_epoch) for b in loader.step(step)):
        seen += batch.documents
        assert batch.cu_seqlens_S1.tolist() == np.cumsum([0, *batch.lengths]).tolist()
        assert batch.tokens == len(batch.tokens_T) == sum(batch.lengths)
        at = 0
        for number, length in zip(batch.documents, batch.lengths, strict=True):
            tokens, is_target = view.document(number)
            labels = [int(t) if m else IGNORED for t, m in zip(tokens[1:], is_target[1:], strict=True)] + [IGNORED]
            assert batch.tokens_T[at : at + length].tolist() == tokens.tolist()
            assert batch.labels_T[at : at + length].tolist() == labels
            assert batch.positions_T[at : at + length].tolist() == list(range(length))
            at += length
    assert sorted(seen) == sorted([*range(4), *range(4)])


def test_one_pass_for_evaluation_holds_every_document_once_and_all_targets(source, renderer):
    view = build(source, renderer).limit(30, "split")
    for pack in (True, False):
        plan = EpochPlan(view.lengths, capacity=30, seed=1, pack=pack)
        batches = list(Loader(view=view, plan=plan, packs_per_step=1).whole())
        assert sorted(n for batch in batches for n in batch.documents) == list(range(len(view)))
        assert sum(batch.target_tokens for batch in batches) == view.target_tokens
        assert len(batches) == plan.packs_per_epoch


def test_a_step_does_not_depend_on_the_steps_before_it(source, renderer):
    view = build(source, renderer).limit(30, "split")
    plan = EpochPlan(view.lengths, capacity=30, seed=1)
    forward = Loader(view=view, plan=plan, packs_per_step=3)
    tokens = [[batch.tokens_T.tolist() for batch in forward.step(step)] for step in range(20)]
    resumed = Loader(view=view, plan=EpochPlan(view.lengths, capacity=30, seed=1), packs_per_step=3)
    assert [[batch.tokens_T.tolist() for batch in resumed.step(step)] for step in range(11, 20)] == tokens[11:]


def test_a_batch_keeps_its_types(source, renderer):
    import torch

    view = build(source, renderer).limit("p100", "error")
    plan = EpochPlan(view.lengths, capacity=1000, seed=1)
    [batch] = Loader(view=view, plan=plan, packs_per_step=1).step(0)
    moved = batch.to(torch.device("cpu"))
    for each in (batch, moved):
        assert each.tokens_T.dtype == each.labels_T.dtype == each.positions_T.dtype == torch.int64
        assert each.cu_seqlens_S1.dtype == torch.int32
    assert moved.documents == batch.documents
