"""Loss falls on exactly the characters the model must write: eight families of chat templates against their own truth.

The templates in chat_templates/ mark the assistant's part with {% generation %}. The renderer gets them without these
marks and must find the same part; the marked version, rendered by transformers, is the truth it is compared with.
"""

import json
import random
import re
from functools import cache
from pathlib import Path

import pytest
from tokenizers_made import make_tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gatewright.data.rows import Completion, Conversation, Place, PlainText
from gatewright.data.template import Renderer
from gatewright.spec.errors import DataError

FOLDER = Path(__file__).parent / "chat_templates"
PLACE = Place("chat.jsonl", 1, is_line=True)
CHATML = {"special": ("<|im_start|>", "<|im_end|>"), "eos": "<|im_end|>"}
QWEN = CHATML | {"added": ("<think>", "</think>", "<tool_call>", "</tool_call>")}
DEEPSEEK = (
    "User Assistant outputs_begin output_begin output_end outputs_end calls_begin call_begin sep call_end calls_end"
)
FAMILIES = {
    "chatml": CHATML,
    "qwen3": QWEN,
    "qwen35": QWEN,
    "llama3": {
        "special": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "eos": "<|eot_id|>",
        "bos": "<|begin_of_text|>",
    },
    "mistral": {"special": (), "eos": "</s>", "bos": "<s>"},
    "gemma": {"special": ("<start_of_turn>", "<end_of_turn>"), "eos": "<eos>", "bos": "<bos>"},
    "deepseek": {
        "special": tuple(f"<|{word}|>" for word in DEEPSEEK.split()),
        "eos": "<|end_of_sentence|>",
        "bos": "<|begin_of_sentence|>",
    },
    "channels": {
        "special": ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        "eos": "<|return|>",
    },
}
WITH_TOOLS = ("qwen3", "qwen35", "deepseek", "channels")
WITH_THOUGHTS = ("qwen3", "qwen35", "channels")
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": {}}}]


def unmarked(template: str) -> str:
    """The template without its marks, white space around them treated alike."""
    template = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template)
    return re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", template)


@cache
def family(name: str):
    """(renderer without the marks, tokenizer, template with the marks)."""
    marked = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer(**FAMILIES[name], template=unmarked(marked))
    return Renderer(tokenizer), tokenizer, marked


def user(text):
    return {"role": "user", "content": text}


def assistant(text, thought=None, calls=()):
    message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": f"call{k:05d}", "function": {"name": name, "arguments": arguments}}
            for k, (name, arguments) in enumerate(calls)
        ]
    return message


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "call00000"}


def conversation(*messages, tools=None, **kwargs):
    return Conversation(place=PLACE, messages=list(messages), tools=tools, **kwargs)


def truth(name: str, row: Conversation):
    """Text and marked spans, as transformers renders the marked template."""
    _, tokenizer, marked = family(name)
    messages = json.loads(json.dumps(row.messages))
    if name == "deepseek":
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    [text], [spans] = render_jinja_template(
        [messages], row.tools, chat_template=marked, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    return text, spans


def check(name: str, row: Conversation):
    renderer, tokenizer, _ = family(name)
    text, spans = truth(name, row)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    wanted = [any(a <= s and e <= b for a, b in spans) for s, e in encoding["offset_mapping"]]
    document = renderer.document(row)
    assert document.tokens == encoding["input_ids"]
    assert document.is_target == wanted, f"{text!r}\nwanted {spans}"
    straddling = sum(any(s < a < e for a, _ in spans) for s, e in encoding["offset_mapping"])
    assert document.straddling_tokens == straddling


def trained_text(name: str, row: Conversation) -> list[str]:
    """Each run of trained tokens as text."""
    renderer, tokenizer, _ = family(name)
    document = renderer.document(row)
    runs, previous = [], False
    for token, is_target in zip(document.tokens, document.is_target, strict=True):
        if is_target and not previous:
            runs.append([])
        if is_target:
            runs[-1].append(token)
        previous = is_target
    return [tokenizer.decode(run) for run in runs]


WORDS = [
    "Paris", "yes", "x", "four\nlines\n\nof text\n", "\n\nafter two lines", "  spaced  ", "😀 é 中文 ﬁ", "93751000000",
    "[INST] not a prompt [/INST]", "assistant", "user\nassistant\n", '{"a": "b\\n"}', "<b>bold</b>", "{{ messages }}",
    "The capital of France is Paris.", "model\n", "…", "'quoted' \"twice\"",
]  # fmt: skip
VALUES = [
    {"city": "Paris"},
    {"city": "Rome", "days": 3, "exact": True},
    {},
    {"nested": {"list": ["a", 1, None]}},
    {"n": 2},
]


def random_conversation(draw: random.Random, *, tools: bool, thoughts: bool) -> Conversation:
    def words():
        return "".join(draw.choice(WORDS) for _ in range(draw.choice((1, 1, 2, 3))))

    def thought():
        return words() if thoughts and draw.random() < 0.4 else None

    messages, has_tools = [], tools and draw.random() < 0.5
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        messages.append(user(words()))
        if has_tools and draw.random() < 0.6:
            said = words() if draw.random() < 0.5 else ""
            messages.append(assistant(said, thought(), [(draw.choice(("weather", "time_now")), draw.choice(VALUES))]))
            messages.append(tool(words()))
        inline = f"<think>\n{words()}\n</think>\n\n{words()}" if thoughts and draw.random() < 0.2 else None
        messages.append(assistant(inline) if inline else assistant(words(), thought()))
    return conversation(*messages, tools=TOOLS if has_tools else None)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations_are_trained_on_the_model_s_part_only(name):
    draw = random.Random(name)
    found = 0
    for _ in range(150):
        row = random_conversation(draw, tools=name in WITH_TOOLS, thoughts=name in WITH_THOUGHTS)
        try:
            check(name, row)
            found += 1
        except DataError as error:
            assert name == "channels" and "leaves out its content" in str(error), error
    assert found > 75


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"gemma", "mistral"}))
def test_system_message(name):
    check(name, conversation({"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello.")))


def test_what_is_trained_reads_as_the_model_s_answers():
    row = conversation(user("Hi"), assistant("Hello."), user("Hi"), assistant("Hello."))
    assert trained_text("chatml", row) == ["Hello.<|im_end|>"] * 2
    assert trained_text("llama3", row) == ["Hello.<|eot_id|>"] * 2
    assert trained_text("mistral", row) == [" Hello.</s>"] * 2
    assert trained_text("gemma", row) == ["Hello.<end_of_turn>"] * 2
    assert trained_text("deepseek", row) == ["Hello.<|end_of_sentence|>"] * 2
    assert trained_text("qwen3", row) == ["Hello.<|im_end|>", "<think>\n\n</think>\n\nHello.<|im_end|>"]
    final = "<|channel|>final<|message|>Hello."
    assert trained_text("channels", row) == [f"{final}<|end|>", f"{final}<|return|>"]


def test_thinking_is_trained_where_the_template_writes_it():
    row = conversation(user("1+1"), assistant("2", "Easy."), user("2+2"), assistant("4", "Easy too."))
    inline = conversation(*row.messages[:3], assistant("<think>\nEasy too.\n</think>\n\n4"))
    last = "<think>\nEasy too.\n</think>\n\n4<|im_end|>"
    for each in (row, inline):
        assert trained_text("qwen3", each) == ["2<|im_end|>", last]
        assert trained_text("qwen35", each) == ["2<|im_end|>", last.removeprefix("<think>\n")]
        assert family("qwen3")[0].document(each).dropped_reasoning == 1


def test_tool_calls_are_trained_and_tool_answers_are_not():
    row = conversation(
        user("Weather?"),
        assistant("", None, [("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]),
        tool("sunny"),
        tool("rain"),
        assistant("Sun in Paris, rain in Rome."),
        tools=TOOLS,
    )
    for name in ("qwen3", "qwen35", "deepseek"):
        check(name, row)
        calls, answer = trained_text(name, row)
        assert calls.count("weather") == 2 and "Paris" in calls and "Rome" in calls
        assert answer.startswith("Sun in") or answer.removeprefix("<think>\n").startswith("\n</think>\n\nSun in")
    assert trained_text("deepseek", row)[0].startswith("<|calls_begin|>")


def test_arguments_may_be_given_as_json_text():
    as_object = conversation(user("?"), assistant("", None, [("weather", {"city": "Paris", "days": 2})]), tool("sunny"))
    as_text = json.loads(json.dumps(as_object.messages))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Paris", "days": 2}'
    for name in ("qwen3", "qwen35", "deepseek"):
        assert family(name)[0].document(as_object) == family(name)[0].document(conversation(*as_text))


def test_prompt_and_completion_messages_train_the_completion_only():
    messages = [user("Hi"), assistant("Hello."), user("Bye"), assistant("See you.")]
    row = conversation(*messages, trained_from=3)
    assert trained_text("chatml", row) == ["See you.<|im_end|>"]


def test_an_assistant_may_open_the_conversation_or_answer_nothing():
    check("chatml", conversation(assistant("Welcome!"), user("Hi"), assistant("Hello.")))
    assert trained_text("chatml", conversation(user("Hi"), assistant(""))) == ["<|im_end|>"]
    assert trained_text("llama3", conversation(user("Hi"), assistant("   \n"))) == ["<|eot_id|>"]


def test_a_conversation_without_assistant_has_no_targets():
    assert not any(family("chatml")[0].document(conversation(user("Hi"))).is_target)


def test_two_answers_in_a_row_are_both_trained():
    check("chatml", conversation(user("Hi"), assistant("Hello."), assistant("How are you?")))


def test_role_tokens_can_be_the_end_of_a_turn(tmp_path):
    template = unmarked((FOLDER / "glm.jinja").read_text())
    special = ("<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>")
    tokenizer = make_tokenizer(special=special, eos="<|endoftext|>", template=template, folder=tmp_path)
    row = conversation(user("Hi"), assistant("Hello."), user("Bye"), assistant("See you."))
    with pytest.raises(DataError, match="no special token behind it"):
        Renderer(tokenizer).document(row)
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|user|>", "<|observation|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    document = Renderer(tokenizer).document(row)
    text = "".join(
        tokenizer.decode([token]) if is_target else "·"
        for token, is_target in zip(document.tokens, document.is_target, strict=True)
    )
    assert re.sub("·+", "·", text) == "·\nHello.<|user|>·\nSee you.<|endoftext|>"


def test_a_block_that_the_model_opens_itself_needs_no_generation_prompt():
    """As in reasoning models of the Mistral kind, which have no role header before an answer."""
    template = (
        "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}{%- else %}"
        "{%- if m.reasoning_content %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}"
        "{{- m.content + eos_token }}{% endif %}{% endfor %}"
    )
    special = ("[INST]", "[/INST]", "[THINK]", "[/THINK]")
    tokenizer = make_tokenizer(special=special, eos="</s>", template=template)
    document = Renderer(tokenizer).document(conversation(user("1+1"), assistant("2", "Easy.")))
    first = document.is_target.index(True)
    assert tokenizer.decode(document.tokens[first:]) == "[THINK]Easy.[/THINK]2</s>"


# What must be refused.


def test_a_template_file_takes_the_place_of_the_tokenizer_s(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(unmarked((FOLDER / "chatml.jinja").read_text()))
    renderer = Renderer(make_tokenizer(template="{{ messages[0].content }}"), template=str(file))
    row = conversation(user("Hi"), assistant("Hello."))
    assert renderer.document(row) == family("chatml")[0].document(row)
    with pytest.raises(DataError, match=r"data.chat_template: .*absent.jinja cannot be read"):
        Renderer(make_tokenizer(), template=str(tmp_path / "absent.jinja"))


def test_a_template_s_own_marks_must_cover_the_words():
    row = conversation(user("Hi"), assistant("Hello."), user("Bye"), assistant("See you."))
    marked = (FOLDER / "chatml.jinja").read_text()
    assert Renderer(make_tokenizer(template=marked)).document(row) == family("chatml")[0].document(row)
    only_last = marked.replace("{% generation %}", "{% if loop.last %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"turn 1 .*generation %} marks do not cover its words"):
        Renderer(make_tokenizer(template=only_last)).document(row)


def test_shapes_are_remembered_without_harm():
    """The same renderer, fed rows in any order, gives what a fresh one gives."""
    draw = random.Random(5)
    for name in ("qwen3", "qwen35", "deepseek"):
        rows = [random_conversation(draw, tools=True, thoughts=name != "deepseek") for _ in range(40)]
        used, tokenizer, _ = family(name)
        assert [used.document(row) for row in rows] == [Renderer(tokenizer).document(row) for row in rows]


def test_few_renderings_for_rows_of_a_known_shape():
    renderer, _, _ = family("chatml")
    rows = [conversation(*[user(f"question {i}"), assistant(f"answer {i}")] * 3) for i in range(2)]
    renderer.document(rows[0])
    renders = []
    render = renderer.tokenizer.apply_chat_template
    renderer.tokenizer.apply_chat_template = lambda *args, **kwargs: renders.append(1) or render(*args, **kwargs)
    try:
        renderer.document(rows[1])
    finally:
        renderer.tokenizer.apply_chat_template = render
    assert len(renders) == 2


# Rows without a chat template.


def test_text_is_trained_whole_and_ends_once():
    tokenizer = make_tokenizer()
    for text in ("The fox.", "The fox.<|im_end|>"):
        document = Renderer(tokenizer).document(PlainText(place=PLACE, text=text))
        assert tokenizer.decode(document.tokens) == "The fox.<|im_end|>"
        assert all(document.is_target)


def test_text_begins_where_the_tokenizer_begins_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos="<s>")
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    document = Renderer(tokenizer).document(PlainText(place=PLACE, text="The fox."))
    assert document.tokens[0] == begin and document.tokens.count(begin) == 1
    completion = Renderer(tokenizer).document(Completion(place=PLACE, prompt="The", completion=" fox."))
    assert completion.tokens == document.tokens
    assert tokenizer.decode(completion.tokens[completion.is_target.index(True) :]) == " fox.<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "completion"), [("The capital is", " Paris."), ("The capital is ", "Paris."), ("", "x")]
)
def test_completions_are_trained_and_prompts_are_not(prompt, completion):
    tokenizer = make_tokenizer()
    document = Renderer(tokenizer).document(Completion(place=PLACE, prompt=prompt, completion=completion))
    first = document.is_target.index(True)
    assert all(document.is_target[first:])
    assert tokenizer.decode(document.tokens[:first]) == prompt
    assert tokenizer.decode(document.tokens[first:]) == completion + "<|im_end|>"
    assert document.tokens[:first] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_text_needs_an_end_token():
    with pytest.raises(DataError, match="no eos_token to end a text with"):
        Renderer(make_tokenizer(eos=None)).document(PlainText(place=PLACE, text="The fox."))


def test_rows_of_all_kinds_in_one_batch_keep_their_order():
    renderer, _, _ = family("chatml")
    rows = [
        PlainText(place=PLACE, text="One."),
        conversation(user("Hi"), assistant("Hello.")),
        Completion(place=PLACE, prompt="Two", completion=" three"),
        conversation(user("Bye"), assistant("See you.")),
    ]
    assert renderer.documents(rows) == [renderer.document(row) for row in rows]
    assert renderer.documents([]) == []


def test_a_tokenizer_file_that_truncates_does_not_shorten_documents():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    document = Renderer(tokenizer).document(PlainText(place=PLACE, text="The quick brown fox jumps. " * 9))
    assert len(document.tokens) > 40 and tokenizer.decode(document.tokens).count("fox") == 9
