"""Messages with their words replaced by marks, and the marks found again in a rendering: the measuring rods of spans.

A mark is a number that does not occur in the conversation. Digits pass unchanged through all that templates do to
words (trimming, JSON, escapes, upper case), and what a template decides by the form of a message stays decided: empty
stays empty, `<think>` and other tokens of the vocabulary inside a content stay where they are.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gatewright.data.rows import Message

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which data sets keep what a model thinks before it answers; transformers takes them for one."""
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")
END_OF_THOUGHT = "</think>"
CONTENT, REASONING, FIRST_CALL, LAST_CALL = 0, 1, 2, 49
"""Parts of a message: its content, its reasoning, and each of its tool calls (the last number: all further ones)."""

Shape = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of a rendering from a first to a last mark of one message, without marks of another between them."""

    message: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """A rendering of messages with marks."""

    text: str
    runs: list[Run]
    """In the order of the text; a message has several when another stands between its words."""
    shown: Counter[str]
    """How often each mark occurs."""

    def before(self, k: int) -> str:
        """Text between run k and the run before it, or the beginning."""
        return self.text[self.runs[k - 1].end if k else 0 : self.runs[k].begin]

    def behind(self, k: int) -> str:
        """Text between run k and the next one, or the end."""
        return self.text[self.runs[k].end : self.runs[k + 1].begin if k + 1 < len(self.runs) else len(self.text)]

    @property
    def tail(self) -> str:
        """Text behind the last run."""
        return self.text[self.runs[-1].end if self.runs else 0 :]

    def excerpt(self, k: int) -> str:
        """The text around the beginning of run k, for a person to read: runs are named, marks are not shown."""
        shown, at = "", None
        for number, run in enumerate(self.runs):
            shown += self.before(number)
            at = len(shown) if number == k else at
            shown += f"[words of message {run.message + 1}]"
        return excerpt(shown + self.tail, len(shown) if at is None else at)


class Marker:
    """Puts marks into messages and finds them in renderings."""

    def __init__(self, *, unlike: str, kept: re.Pattern[str]) -> None:
        """Marks do not occur in `unlike`; texts that `kept` matches are not replaced."""
        salt = 93751
        while str(salt) in unlike:
            salt += 1
        self._salt = salt
        self._kept = kept
        self._pattern = re.compile(rf"{salt}(\d{{5}})\d\d")
        self._names: dict[str, str] = {}
        """Mark of a tool's name → the name."""

    def put(self, message: Message, index: int) -> Message:
        """The message with marks that carry `index` in place of its words."""
        content, reasoning = self._mark(index, CONTENT), self._mark(index, REASONING)
        if message["role"] != "assistant" or not words_of(message, self._kept):
            pieces = [piece if is_kept else content for is_kept, _, piece in _pieces(message["content"], self._kept)]
            return {**message, "content": "".join(pieces) or content}
        marked = dict(message)
        if message["content"] is not None:
            marked["content"] = "".join(
                piece if is_kept else _replace(piece, reasoning if is_thought else content)
                for is_kept, is_thought, piece in _pieces(message["content"], self._kept)
            )
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                marked[key] = _replace(message[key], reasoning)
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                self._put_call(call, index, part) for part, call in zip(_call_parts(calls), calls, strict=True)
            ]
        return marked

    def read(self, text: str) -> MarkedText:
        """The marks in a rendering of messages in which this marker has put them.

        Some templates repeat the name of a called tool where they write the tool's answer. The call stands first, so
        where the mark of a name comes again, it is not the assistant's and becomes the name.
        """
        for mark, name in self._names.items():
            own = text.find(mark) + len(mark)
            text = text[:own] + text[own:].replace(mark, name)
        runs: list[Run] = []
        for match in self._pattern.finditer(text):
            index = int(match[1])
            begin = runs.pop().begin if runs and runs[-1].message == index else match.start()
            runs.append(Run(index, begin, match.end()))
        return MarkedText(text=text, runs=runs, shown=Counter(match[0] for match in self._pattern.finditer(text)))

    def fault(self, message: Message, index: int, rendering: MarkedText) -> str | None:
        """What a rendering does wrong with the words of an assistant's message; its reasoning alone may be absent."""
        marked = repr(self.put(message, index))
        for part, words in words_of(message, self._kept):
            name = {CONTENT: "content", REASONING: "reasoning"}.get(part, f"call of {words}")
            for mark in {self._mark(index, part), self._mark(index, part, of_name=True)}:
                if part != REASONING and rendering.shown[mark] < marked.count(mark):
                    return f"leaves out its {name}"
                if rendering.shown[mark] > marked.count(mark):
                    return f"writes its {name} more than once"
        return None

    def _put_call(self, call: dict[str, Any], index: int, part: int) -> dict[str, Any]:
        function = dict(function_of(call))
        name_mark = self._mark(index, part, of_name=True)
        if part < LAST_CALL:
            self._names[name_mark] = function["name"]
            function["name"] = name_mark
        function["arguments"] = _replace_texts(function.get("arguments", {}), self._mark(index, part))
        return {**call, "function": function} if "function" in call else function

    def _mark(self, index: int, part: int, *, of_name: bool = False) -> str:
        return f"{self._salt}{index:05d}{part + 50 * of_name:02d}"


def keep_pattern(added_tokens: list[str]) -> re.Pattern[str]:
    """Matches what stays in a content: tokens of the vocabulary that are no words, and tags that templates look for."""
    longest_first = sorted({*added_tokens, *TAGS}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def words_of(message: Message, kept: re.Pattern[str]) -> list[tuple[int, str]]:
    """(part, words) of what an assistant's message says: pieces of its content, its reasoning, the tools it calls."""
    words = [
        (REASONING if is_thought else CONTENT, piece.strip())
        for is_kept, is_thought, piece in _pieces(message["content"], kept)
        if not is_kept and piece.strip()
    ]
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            words.append((REASONING, message[key].strip()))
            break
    calls = message.get("tool_calls", ())
    return words + [(part, function_of(call)["name"]) for part, call in zip(_call_parts(calls), calls, strict=True)]


def shape_of(message: Message, kept: re.Pattern[str]) -> Shape:
    """All of a message by which a template may choose its literal text: everything but the words."""
    content = tuple(
        piece if is_kept else bool(piece.strip()) for is_kept, _, piece in _pieces(message["content"], kept)
    )
    reasoning = tuple(bool(message[key].strip()) for key in REASONING_KEYS if isinstance(message.get(key), str))
    calls = tuple(len(function_of(call).get("arguments", ())) > 0 for call in message.get("tool_calls", ()))
    return message["role"], content, reasoning, calls


def excerpt(text: str, at: int, *, reach: int = 90) -> str:
    """One line of the text on both sides of character `at`."""
    begin, end = max(0, at - reach), at + reach
    line = text[begin:end].replace("\n", "\\n")
    return f"{'…' if begin else ''}{line}{'…' if end < len(text) else ''}"


def function_of(call: dict[str, Any]) -> dict[str, Any]:
    """The name and arguments of a tool call, which some data sets wrap and others do not."""
    function: dict[str, Any] = call.get("function", call)
    return function


def _call_parts(calls: Sequence[object]) -> list[int]:
    return [min(FIRST_CALL + k, LAST_CALL) for k in range(len(calls))]


def _pieces(content: str | None, kept: re.Pattern[str]) -> list[tuple[bool, bool, str]]:
    """(is kept, is thought, piece): the content cut at everything that stays; joined again it is the content."""
    content = content or ""
    thought_ends = content.rfind(END_OF_THOUGHT)
    pieces, at = [], 0
    for match in [*kept.finditer(content), None]:
        begin, end = match.span() if match else (len(content), len(content))
        pieces += [(False, at < thought_ends, content[at:begin]), (True, begin < thought_ends, content[begin:end])]
        at = end
    return [piece for piece in pieces if piece[2]]


def _replace(text: str, mark: str) -> str:
    """The mark, with the white space around the text; blank text stays as it is."""
    words = text.strip()
    if not words:
        return text
    begin = text.index(words)
    return text[:begin] + mark + text[begin + len(words) :]


def _replace_texts(value: object, mark: str) -> object:
    """Arguments with every text in them replaced; numbers and keys stay."""
    if isinstance(value, str):
        return mark
    if isinstance(value, dict):
        return {key: _replace_texts(part, mark) for key, part in value.items()}
    return [_replace_texts(part, mark) for part in value] if isinstance(value, list) else value
