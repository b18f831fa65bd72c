"""Rows into tokens: through the chat template for conversations, and with loss on the model's own words only."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from gatewright.data.cuts import SpanError, TemplateError, Tools
from gatewright.data.marks import excerpt, function_of
from gatewright.data.rows import Conversation, Message, PlainText, Row
from gatewright.data.spans import Rendered, SpanFinder
from gatewright.spec.errors import DataError

TOOL_CALL_FORMS = [(as_text, no_content) for no_content in ("", None) for as_text in (False, True)]
"""(arguments as JSON text, content of a message that only calls). Templates disagree; the first that works is taken."""
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One row as tokens."""

    tokens: list[int]
    is_target: list[bool]
    """Whether the model learns to write this token. For the first one that has no effect: nothing stands before it."""
    straddling_tokens: int = 0
    """Tokens that begin in the prompt and end in the model's words; they are no targets."""
    dropped_reasoning: int = 0
    """Turns before the last whose reasoning the chat template leaves out."""


class Renderer:
    """Turns rows into documents with one tokenizer and one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, template: str | None = None) -> None:
        """`template` is the path of a Jinja file to use in place of the tokenizer's own chat template.

        Raises DataError when that file cannot be read.
        """
        self.tokenizer = tokenizer
        self._template = _read_template(Path(template)) if template else None
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._end_tokens = _end_tokens(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        self._spans = SpanFinder(
            self._render,
            special_tokens=[token.content for token in added if token.special] + self._end_tokens,
            added_tokens=[token.content for token in added],
            end_tokens=self._end_tokens,
        )
        self._form = TOOL_CALL_FORMS[0]

    @property
    def fingerprint(self) -> str:
        """sha256 of all that decides which tokens a row becomes."""
        template = self._template or self.tokenizer.chat_template
        parts = [self._backend.to_str(), template, self._end_tokens, self.tokenizer.special_tokens_map]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def document(self, row: Row) -> Document:
        """The tokens of one row.

        Raises DataError with the row's place when there is no chat template, or it refuses the row, or the model's
        words cannot be told from the rest.
        """
        return self.documents([row])[0]

    def documents(self, rows: Sequence[Row]) -> list[Document]:
        """The tokens of several rows; the tokenizer works on them in parallel."""
        documents: dict[int, Document] = {}
        chats = {at: self._conversation(row) for at, row in enumerate(rows) if isinstance(row, Conversation)}
        encodings = self._backend.encode_batch([chat.text for chat in chats.values()], add_special_tokens=False)
        for (at, chat), encoding in zip(chats.items(), encodings, strict=True):
            documents[at] = _chat_document(chat, encoding)
        plain = {at: row for at, row in enumerate(rows) if not isinstance(row, Conversation)}
        texts = [row.text if isinstance(row, PlainText) else row.prompt + row.completion for row in plain.values()]
        for (at, row), encoding in zip(plain.items(), self._backend.encode_batch(texts), strict=True):
            documents[at] = self._plain_document(row, encoding)
        return [documents[at] for at in range(len(rows))]

    def _conversation(self, row: Conversation) -> Rendered:
        """The row as text with its spans."""
        if not (self._template or self.tokenizer.chat_template):
            raise DataError(
                f"{row.place}: messages need a chat template, and this tokenizer has none; set data.chat_template to "
                "a Jinja file, or give rows of prompt and completion"
            )
        failure: Exception | None = None
        forms = [self._form, *(form for form in TOOL_CALL_FORMS if form != self._form)]
        for form in forms if any("tool_calls" in message for message in row.messages) else forms[:1]:
            messages = [_in_form(message, *form) for message in row.messages]
            try:
                rendered = self._spans.find(messages, row.tools, trained_from=row.trained_from)
                self._check_own_marks(rendered, messages, row)
            except (SpanError, TemplateError) as error:
                failure = failure or error
            else:
                self._form = form
                return rendered
        assert failure
        raise DataError(_explain(failure, row)) from failure

    def _check_own_marks(self, rendered: Rendered, messages: list[Message], row: Conversation) -> None:
        """Where a template marks the assistant's part itself, its marks must cover the words that we train on."""
        template = self._template or self.tokenizer.get_chat_template(tools=row.tools)
        if not GENERATION_TAG.search(template):
            return
        _, [marked] = render_jinja_template(
            [messages], row.tools, chat_template=template, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= row.trained_from]
        for turn, words in zip(turns, rendered.words, strict=True):
            if not all(any(begin <= at < end for begin, end in marked) for at in (words.begin, words.end - 1)):
                raise SpanError(
                    "the template's own {% generation %} marks do not cover its words",
                    message=turn, excerpt=excerpt(rendered.text, words.begin),
                )  # fmt: skip

    def _render(self, messages: list[Message], tools: Tools, add_generation_prompt: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error
        return text

    def _plain_document(self, row: Row, encoding: Encoding) -> Document:
        """The tokenizer's own beginning, the text, and one end-of-sequence token."""
        assert not isinstance(row, Conversation)
        end = self.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise DataError(f"{row.place}: this tokenizer has no eos_token to end a text with; set it in its config")
        tokens = _without_end(encoding.ids, end)
        if isinstance(row, PlainText):
            return Document(tokens=[*tokens, end], is_target=[True] * (len(tokens) + 1))
        first, straddles = _first_token(encoding, len(row.prompt), default=len(tokens))
        if straddles:
            # At inference the prompt is tokenised alone, so it is here.
            prompt = _without_end(self._backend.encode(row.prompt).ids, end)
            completion = self._backend.encode(row.completion, add_special_tokens=False).ids
            tokens, first = prompt + completion, len(prompt)
        return Document(
            tokens=[*tokens, end],
            is_target=[False] * first + [True] * (len(tokens) + 1 - first),
        )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template: {path} cannot be read as UTF-8 text: {error}") from None


def _end_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Tokens that stop generation: the tokenizer's eos, and those of the model's generation_config.json."""
    file = Path(tokenizer.name_or_path) / "generation_config.json"
    ids: Any = json.loads(file.read_bytes()).get("eos_token_id") if file.exists() else None
    tokens = [tokenizer.eos_token, *tokenizer.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids or [])]
    return list(dict.fromkeys(token for token in tokens if token))


def _in_form(message: Message, arguments_as_text: bool, no_content: str | None) -> Message:
    """The message with its tool calls as one kind of template wants them."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(function_of(call))
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and not arguments_as_text:
            function["arguments"] = json.loads(arguments)
        elif not isinstance(arguments, str) and arguments_as_text:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls, "content": message["content"] or no_content}


def _chat_document(chat: Rendered, encoding: Encoding) -> Document:
    is_target = [False] * len(encoding.ids)
    straddling = 0
    for span in chat.spans:
        first, straddles = _first_token(encoding, span.begin, default=len(is_target))
        straddling += straddles
        last = encoding.char_to_token(span.end - 1)
        assert last is not None, "a span ends with a special token"
        is_target[first : last + 1] = [True] * (last + 1 - first)
    return Document(
        tokens=encoding.ids,
        is_target=is_target,
        straddling_tokens=straddling,
        dropped_reasoning=chat.dropped_reasoning,
    )


def _first_token(encoding: Encoding, begin: int, *, default: int) -> tuple[int, bool]:
    """The first token that lies wholly behind character `begin`, and whether the one before it straddles `begin`."""
    token = encoding.char_to_token(begin)
    characters = None if token is None else encoding.token_to_chars(token)
    if token is None or characters is None:
        return default, False
    straddles = characters[0] < begin
    return token + straddles, straddles


def _without_end(tokens: list[int], end: int) -> list[int]:
    """The tokens without an end-of-sequence token that the tokenizer, or the text itself, has put last."""
    return tokens[:-1] if tokens and tokens[-1] == end else tokens


def _explain(error: Exception, row: Conversation) -> str:
    if isinstance(error, TemplateError):
        roles = ", ".join(message["role"] for message in row.messages[:6])
        more = ", …" if len(row.messages) > 6 else ""
        return (
            f"{row.place}: the chat template refuses this conversation ({roles}{more}): {error}\n"
            "Change the row, or set data.chat_template to a template that takes it."
        )
    assert isinstance(error, SpanError)
    turn = sum(message["role"] == "assistant" for message in row.messages[: error.message + 1])
    return (
        f"{row.place}: loss cannot be put on assistant turn {turn} (message {error.message + 1}) alone: {error}.\n"
        f"There the text reads: {error.excerpt}\n"
        "Set data.chat_template to a template that writes the assistant's words unchanged, between the generation "
        "prompt and a special token; or change the row."
    )
