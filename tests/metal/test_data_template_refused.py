"""Templates that must be refused: those under which the model's part of a conversation cannot be told from the rest."""

import pytest
from test_data_template import assistant, conversation, family, user
from tokenizers_made import make_tokenizer

from gatewright.data.template import Renderer
from gatewright.spec.errors import DataError

HEAD = "{%- for m in messages %}"
REFUSED = {
    "ignores what the assistant says": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + (m.content if m.role != 'assistant' else '') + '<|im_end|>\n' }}",
        "leaves out its content",
    ),
    "says it twice": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + m.content + m.content + '<|im_end|>\n' }}",
        "writes its content more than once",
    ),
    "changes it": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + m.content | upper + '<|im_end|>\n' }}",
        "alters or leaves out its words 'Hello there.'",
    ),
    "has no end token": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + m.content + '\n' }}",
        "no special token behind it",
    ),
    "knows no generation prompt": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
        "at inference the model would not be given it",
    ),
    "knows no generation prompt for its plain header": (
        HEAD + "{{- '### ' + m.role + ': ' + m.content + '<|im_end|>\\n' }}",
        "at inference the model would not be given it",
    ),
    "prompts for another role than it writes": (
        HEAD + "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|im_start|>model\n' }}{% endif %}",
        "but gives .* as the prompt for it",
    ),
    "prompts with another token than it writes": (
        HEAD + "{{- '<|im_start|>' + ('<|bot|>' if m.role == 'assistant' else '\n') + m.content + '<|im_end|>\n' }}"
        "{%- if loop.last and add_generation_prompt %}{{- '<|im_start|><|im_start|>' }}{% endif %}",
        "but gives .* as the prompt for it",
    ),
    "puts the answers first": (
        "{%- for m in messages if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{%- for m in messages if m.role == 'user' %}"
        "{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}",
        "",
    ),
    "counts the answer's letters": (
        HEAD + "{{- '<|im_start|>' + m.role + m.content | length | string + '\n' + m.content + '<|im_end|>\n' }}",
        "not the same when the assistant's words are replaced",
    ),
    "puts the next question inside the answer": (
        HEAD + "{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' + m.content }}"
        "{{- loop.nextitem.content if not loop.last }}{{- m.reasoning_content + '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}",
        "words of other messages stand between its words",
    ),
}
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is_a_template_that(what):
    body, says = REFUSED[what]
    asks = "" if "prompt" in what else PROMPT
    tokenizer = make_tokenizer(
        special=("<|im_start|>", "<|im_end|>", "<|bot|>"), template=body + "{%- endfor %}" + asks
    )
    thoughts = ("A guest.", "Go.") if "inside" in what else (None, None)
    messages = [user("Hi, who?"), assistant("Hello there.", thoughts[0]), user("Good."), assistant("Bye.", thoughts[1])]
    with pytest.raises(DataError, match=r"chat.jsonl:1: .*assistant turn \d \(message \d\).*" + says) as refusal:
        Renderer(tokenizer).document(conversation(*messages))
    assert "93751" not in str(refusal.value), "marks are not shown to people"
    assert "data.chat_template" in str(refusal.value)


def test_refused_is_reasoning_that_the_template_does_not_write_in_the_last_turn():
    with pytest.raises(DataError, match="leaves out its reasoning"):
        family("chatml")[0].document(conversation(user("Hi"), assistant("Hello.", "A guest.")))
    with pytest.raises(DataError, match="leaves out its call of weather"):
        family("chatml")[0].document(conversation(user("Hi"), assistant("", None, [("weather", {})])))


def test_refused_is_what_the_template_itself_refuses():
    row = conversation({"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hello."))
    with pytest.raises(DataError, match=r"refuses this conversation \(system, user, assistant\): System role not supp"):
        family("gemma")[0].document(row)


def test_refused_are_messages_without_any_template():
    with pytest.raises(DataError, match=r"chat.jsonl:1: messages need a chat template.*data.chat_template"):
        Renderer(make_tokenizer()).document(conversation(user("Hi"), assistant("Hello.")))
