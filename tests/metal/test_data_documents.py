"""Rows out of every kind of file, in order, and an error with its place for everything that is not a row."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from gatewright.data.documents import read_rows, source_files
from gatewright.data.rows import Completion, Conversation, PlainText
from gatewright.spec.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é 😀"}]}
ROWS = [CHAT, {"prompt": "2+2=", "completion": "4"}, {"text": "The fox.", "id": 7}]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def contents(rows):
    return [
        row.messages if isinstance(row, Conversation) else row.text if isinstance(row, PlainText) else row
        for row in rows
    ]


def test_json_lines(tmp_path):
    chat, completion, text = read_rows(write(tmp_path / "a.jsonl", *ROWS))
    assert isinstance(chat, Conversation) and chat.messages == CHAT["messages"] and chat.tools is None
    assert isinstance(completion, Completion) and (completion.prompt, completion.completion) == ("2+2=", "4")
    assert isinstance(text, PlainText) and text.text == "The fox."
    assert [str(row.place) for row in (chat, completion, text)] == [f"{tmp_path}/a.jsonl:{n}" for n in (1, 2, 3)]


def test_blank_lines_and_byte_order_mark(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(CHAT).encode() + b"\r\n\r\n  \n" + json.dumps(CHAT).encode())
    assert [row.place.number for row in read_rows(file)] == [1, 4]


def test_compressed_lines_and_json_suffix(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    plain = contents(read_rows(write(tmp_path / "a.jsonl", CHAT, CHAT)))
    assert contents(read_rows(write(tmp_path / "a.json", CHAT, CHAT))) == plain
    assert len(list(read_rows(tmp_path / "a.jsonl.gz"))) == 3


def test_parquet_and_its_nulls(tmp_path):
    """A table gives every message every key that some message has: nulls that no one wrote are taken out again."""
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}]
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_rows(tmp_path / "a.parquet")
    assert first.messages[0] == {"role": "user", "content": "Hi"}
    assert first.messages[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert second.messages == rows[1]["messages"]
    assert str(second.place) == f"{tmp_path}/a.parquet row 2"


def test_a_folder_of_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "x"}]} for n in range(700)
    ]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    read = list(read_rows(tmp_path / "one"))
    assert [row.messages[0]["content"] for row in read] == [str(n) for n in range(700)]
    datasets.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match=r"several splits; name one: .*/two/test, .*/two/train"):
        source_files(tmp_path / "two")


def test_a_folder_of_shards_in_order_of_name(tmp_path):
    write(tmp_path / "train-00001.jsonl", {"text": "second"})
    write(tmp_path / "train-00000.jsonl", {"text": "first"})
    (tmp_path / "README.md").write_text("about")
    assert contents(read_rows(tmp_path)) == ["first", "second"]
    write(tmp_path / "test-00000.jsonl", {"text": "held out"})
    with pytest.raises(DataError, match=r"files of several splits \(test, train\)"):
        source_files(tmp_path)


def test_what_was_read_adds_up_to_the_files(tmp_path):
    write(tmp_path / "a.jsonl", *ROWS * 50)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS * 50)
    for file in tmp_path.iterdir():
        seen: list[int] = []
        list(read_rows(file, on_read=seen.append))
        assert sum(seen) == file.stat().st_size and min(seen) >= 0


def test_a_large_file_is_read_row_by_row(tmp_path):
    """The first rows come before the last line, which is broken, is looked at."""
    rows = read_rows(write(tmp_path / "a.jsonl", *[CHAT] * 1000, "{broken\n"))
    assert len([next(rows) for _ in range(1000)]) == 1000
    with pytest.raises(DataError, match=r"a.jsonl:1001: not JSON"):
        next(rows)


def test_tools_and_text_parts(tmp_path):
    tools = [{"type": "function", "function": {"name": "weather"}}]
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    file = write(tmp_path / "a.jsonl", {"messages": messages, "tools": tools}, CHAT | {"tools": json.dumps(tools)})
    first, second = read_rows(file)
    assert first.tools == second.tools == tools
    assert first.messages[0]["content"] == "one two"


def test_prompt_and_completion_of_messages(tmp_path):
    prompt, completion = CHAT["messages"][:1], CHAT["messages"][1:]
    [row] = read_rows(write(tmp_path / "a.jsonl", {"prompt": prompt, "completion": completion}))
    assert row.messages == CHAT["messages"] and row.trained_from == 1


def message(**changes):
    return {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"} | changes]}


WRONG_ROWS = {
    "[1, 2]\n": "a row must be an object .* got a list: \\[1, 2\\]",
    '{"question": "a", "answer": "b"}\n': "no messages, .* and no text; the row has question, answer",
    '{"message": []}\n': "the row has message: did you mean messages by message?",
    '{"conversations": [{"from": "human", "value": "Hi"}]}\n': 'rename conversations to messages, "from" to "role"',
    '{"prompt": "a", "chosen": "b", "rejected": "c"}\n': "preference pairs, which sft does not train on",
    "{}\n": "the row has no keys",
    '{"messages": []}\n': "messages must be a list .* got an empty list",
    '{"messages": "Hi"}\n': 'messages must be a list .* got a text: "Hi"',
    '{"messages": ["Hi"]}\n': 'message 1 must be an object .* got a text: "Hi"',
    '{"messages": [{"content": "Hi"}]}\n': "message 1 needs a role .* it has content",
    '{"messages": [{"role": 3, "content": "Hi"}]}\n': "message 1 needs a role .* got a number: 3",
    '{"messages": [{"role": "assistent", "content": "Hi"}]}\n': "role 'assistent'.*did you mean assistant",
    '{"messages": [{"role": "human", "content": "Hi"}]}\n': "role 'human'.*did you mean user",
    '{"text": 5}\n': "text must be a text, got a number: 5",
    '{"prompt": "a", "completion": [1]}\n': "must both be texts or both be lists",
}


@pytest.mark.parametrize("line", WRONG_ROWS)
def test_wrong_rows(tmp_path, line):
    file = write(tmp_path / "a.jsonl", CHAT, line)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*" + WRONG_ROWS[line]):
        list(read_rows(file))


WRONG_MESSAGES = [
    ({"content": 5}, "message 2 has a content that is a number: 5; wanted a text"),
    ({"content": [{"type": "image_url", "image_url": "x"}]}, "content of type image_url; only text is trained"),
    ({"tool_calls": {"name": "f"}}, "tool_calls that are an object"),
    ({"tool_calls": [{"id": "1"}]}, "has the tool call .*wanted"),
    ({"tool_calls": [{"name": "f", "arguments": "{broken"}]}, "calls f with arguments a text: .*; wanted an object"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG_MESSAGES)
def test_wrong_messages(tmp_path, changes, says):
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*" + says):
        list(read_rows(write(tmp_path / "a.jsonl", message(**changes))))


def test_wrong_tools(tmp_path):
    for tools, says in (("{broken", "tools is a text but not JSON"), ([1], "tools must be a list of JSON schemas")):
        with pytest.raises(DataError, match=says):
            list(read_rows(write(tmp_path / "a.jsonl", CHAT | {"tools": tools})))


def test_broken_line_is_named_and_shortened(tmp_path):
    file = write(tmp_path / "a.jsonl", CHAT, '{"messages": [' + "x" * 500 + "\n")
    with pytest.raises(DataError) as error:
        list(read_rows(file))
    assert str(error.value).startswith(f"{file}:2: not JSON: Expecting value at character 15: ")
    assert len(str(error.value)) < 200 and str(error.value).endswith("…")


def test_a_line_nested_too_deep(tmp_path):
    with pytest.raises(DataError, match=r"a.jsonl:1: nested too deep to be read"):
        list(read_rows(write(tmp_path / "a.jsonl", '{"text": ' + "[" * 200_000 + "\n")))


def test_one_json_list(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([CHAT, CHAT], indent=1))
    with pytest.raises(DataError, match=r"a.json:1: a JSON list; wanted one row a line \(jq -c"):
        list(read_rows(file))


def test_not_utf8_and_half_characters(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(CHAT).encode() + b'\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: not UTF-8 at byte 14"):
        list(read_rows(file))
    file.write_text('{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: half of a surrogate pair"):
        list(read_rows(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_empty(tmp_path, name):
    file = tmp_path / name
    if name.endswith("gz"):
        gzip.open(file, "wb").close()
    elif name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    else:
        file.write_text("\n\n")
    with pytest.raises(DataError, match="no rows in it"):
        list(read_rows(file))


def test_missing_and_unknown(tmp_path):
    write(tmp_path / "judge.jsonl", CHAT)
    with pytest.raises(DataError, match=r"jugde.jsonl: no such file or folder; did you mean .*/judge.jsonl\?"):
        source_files(tmp_path / "jugde.jsonl")
    with pytest.raises(DataError, match=r"the folder .*/absent does not exist"):
        source_files(tmp_path / "absent" / "judge.jsonl")
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"a.csv: data is read from \.jsonl, .*not from this kind of file"):
        source_files(tmp_path / "a.csv")
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "notes.txt")
    with pytest.raises(DataError, match=r"no \.jsonl, .* file in it; it holds notes.txt"):
        source_files(tmp_path / "sub")


@pytest.mark.parametrize("kind", ["a.parquet", "a.jsonl.gz"])
def test_cut_short(tmp_path, kind):
    file = tmp_path / kind
    if kind.endswith("gz"):
        file.write_bytes(gzip.compress(json.dumps(CHAT).encode() * 2000)[:-200])
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"] * 1000}), file)
        file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match="damaged or cut short"):
        list(read_rows(file))


def test_shard_that_the_dataset_names_is_missing(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]}))
    with pytest.raises(DataError, match=r"data-00000.arrow: missing, though the dataset's own list names it"):
        list(read_rows(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"state.json: damaged"):
        list(read_rows(tmp_path))
