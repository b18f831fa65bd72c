"""Chat templates of released models, as TRL 1.16 collects them: what is trained is the assistant's, or it is refused.

Skipped where TRL is not installed. It is not imported: its folder of templates is read.
"""

import importlib.util
import json
import re
from itertools import product
from pathlib import Path

import pytest
from tokenizers_made import make_tokenizer

from gatewright.data.rows import Conversation, Place
from gatewright.data.template import Renderer
from gatewright.spec.errors import DataError

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path("absent")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="TRL is not installed")

SPECIAL = re.compile(
    r"<\|[^|<>{}'\" ]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|<\|?(?:turn|channel|tool_call|tool_response)\|?>"
)
ENDS = (
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
)
TOOLS = [{
    "type": "function",
    "function": {
        "name": "weather", "description": "TOOLTEXT",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "TOOLTEXT"}}},
    },
}]  # fmt: skip


def say(role, text, **more):
    return {"role": role, "content": text, **more}


def call(city):
    function = {"name": "weather", "arguments": {"city": city}}
    return {"tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}]}


ANSWERED = say("tool", "TOOLTEXT", tool_call_id="abcdefgh1", name="weather")
CONVERSATIONS = {
    "one": ([say("user", "USERTEXT"), say("assistant", "SAID1")], None),
    "system": ([say("system", "USERTEXT"), say("user", "USERTEXT"), say("assistant", "SAID1")], None),
    "three": (
        [say("user", "USERTEXT"), say("assistant", "SAID1")] * 2 + [say("user", "A"), say("assistant", "SAID2")],
        None,
    ),
    "thoughts": (
        [
            *(say("user", "USERTEXT"), say("assistant", "SAID1")),
            *(say("user", "USERTEXT"), say("assistant", "SAID2", reasoning_content="SAID3")),
        ],
        None,
    ),
    "tools": (
        [say("user", "USERTEXT"), say("assistant", "", **call("SAID1")), ANSWERED, say("assistant", "SAID2")],
        TOOLS,
    ),
    "tools and words": (
        [
            *(say("user", "USERTEXT"), say("assistant", "SAID1", **call("SAID2")), ANSWERED, say("assistant", "SAID3")),
            *(say("user", "USERTEXT"), say("assistant", "SAID4")),
        ],
        TOOLS,
    ),
}
TEXT_MODELS = (
    "cohere cohere2 deepseekv3 gemma3 gemma4_v5 glm4moe gptoss lfm2_v2 llama3 llama3_1 nemotron_3_nano phi3 qwen2_5 "
    "qwen3 qwen3_5_think qwen3_6 qwen3_8"
)
WITH_THOUGHTS = "gemma4_v5 glm4moe gptoss lfm2_2_5 nemotron_3_nano qwen3 qwen3_5_think qwen3_5_nothink qwen3_6 qwen3_8"
WITH_TOOLS = (
    "deepseekv3 gemma4_v5 glm4moe gptoss lfm2_2_5 llama3_1 nemotron_3_nano qwen2_5 qwen3 qwen3_5_think qwen3_6 qwen3_8"
)
MUST_WORK = {
    *product(TEXT_MODELS.split(), ("one", "system", "three")),
    *product(WITH_THOUGHTS.split(), ("thoughts",)),
    *product(WITH_TOOLS.split(), ("tools",)),
}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.jinja")), ids=lambda file: file.stem)
def test_trained_is_what_the_assistant_says(file, tmp_path):
    special = sorted(set(SPECIAL.findall(file.read_text())))
    eos = next((token for token in ENDS if token in special), "<|endoftext|>")
    tokenizer = make_tokenizer(
        special=tuple(special), added=("<think>", "</think>"), eos=eos, bos="<s>", folder=tmp_path
    )
    if "<|observation|>" in special:
        ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    renderer = Renderer(tokenizer, template=str(file))
    for name, (messages, tools) in CONVERSATIONS.items():
        row = Conversation(place=Place("chat.jsonl", 1, is_line=True), messages=messages, tools=tools)
        try:
            document = renderer.document(row)
        except DataError:
            assert (file.stem, name) not in MUST_WORK
            continue
        runs = trained_runs(document)
        trained = " ".join(tokenizer.decode(run) for run in runs)
        assert not re.search("USERTEXT|TOOLTEXT", trained), trained
        said = set(re.findall(r"SAID\d", json.dumps(messages)))
        assert said <= set(re.findall(r"SAID\d", trained)), trained
        assert all(run[-1] in tokenizer.all_special_ids or tokenizer.decode(run[-1:]) in special for run in runs)
        assert len(runs) == sum(message["role"] == "assistant" for message in messages)


def trained_runs(document) -> list[list[int]]:
    runs, previous = [], False
    for token, is_target in zip(document.tokens, document.is_target, strict=True):
        if is_target:
            runs = [*runs[:-1], [*runs[-1], token]] if previous else [*runs, [token]]
        previous = is_target
    return runs
