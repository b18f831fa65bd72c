"""Where the model's part begins and ends in the literal text that a chat template puts around an assistant's words.

It begins where the prompt of that turn ends: the messages before it, rendered with the generation prompt, are what
the model is given at inference, and all that follows it must write, `<think>` and `<tool_call>` included. It ends
behind the special token that the template writes after the turn whatever follows. Both are told by rendering messages
that consist of marks, so what is left is the template's own text; once for each shape of conversation.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gatewright.data.marks import TAGS, MarkedText, Marker, Shape, excerpt, shape_of
from gatewright.data.rows import Message

Tools = list[dict[str, Any]] | None
Render = Callable[[list[Message], Tools, bool], str]
"""(messages, tools, add_generation_prompt) → text. Raises TemplateError."""

CONTEXT_MESSAGES = 6
"""The prompt's end and the turn's end are taken to depend on no more than the shapes of so many messages before."""
MAX_REMEMBERED = 4096


class TemplateError(Exception):
    """The template itself refuses the messages; the text is its own."""


class SpanError(Exception):
    """The part of message `message` (counted from 0) cannot be told from the rest; `excerpt` shows the text there."""

    def __init__(self, reason: str, *, message: int, excerpt: str) -> None:
        super().__init__(reason)
        self.message = message
        self.excerpt = excerpt


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The literal text around one turn's words, and which of it is the model's."""

    header: str
    """What stands between the words before and the turn's own."""
    lead: int
    """So many last characters of the header are the model's."""
    given: str
    """What the prompt has already written where the words begin, such as `<think>`: not the model's, if it is there."""
    stop: str
    """The special token that ends the turn."""
    is_missing: bool
    """The template does not write `stop` behind the last turn, so it must be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One assistant turn of a conversation of marks."""

    messages: list[Message]
    tools: Tools
    index: int
    marked: MarkedText
    k: int
    """Its run in `marked`."""
    context: tuple[object, ...]
    """What the literal text around it depends on."""

    def refused(self, reason: str) -> SpanError:
        return SpanError(reason, message=self.index, excerpt=self.marked.excerpt(self.k))


class CutFinder:
    """Cuts of conversations under one chat template, remembered by the conversation's shape."""

    def __init__(
        self, render: Render, *, special_tokens: list[str], end_tokens: list[str], kept: re.Pattern[str]
    ) -> None:
        """`special_tokens` may end a turn, `end_tokens` stop generation, `kept` matches both and other such tokens."""
        longest_first = sorted({*special_tokens} - {*TAGS}, key=len, reverse=True)
        self._render = render
        self._kept = kept
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._piece = re.compile(rf"({kept.pattern}|\n)")
        self._end_tokens = end_tokens
        self._is_unprompted: bool | None = None
        self._cuts: dict[tuple[object, ...], list[Cut]] = {}
        self._literals: dict[tuple[object, ...], tuple[str, str]] = {}

    def of_conversation(self, messages: list[Message], tools: Tools, marker: Marker, outside: list[str]) -> list[Cut]:
        """One cut a turn; they fit the texts that stand before each turn and behind the last in this conversation."""
        shapes = tuple(shape_of(message, self._kept) for message in messages)
        key = (shapes, bool(tools))
        cuts = self._cuts.get(key)
        if cuts is None or not _fit(cuts, outside):
            try:
                cuts = self._find(messages, tools, shapes, marker)
            except SpanError:
                self._literals.clear()  # What another conversation taught may not hold for this one.
                cuts = self._find(messages, tools, shapes, marker)
            if len(self._cuts) >= MAX_REMEMBERED:
                self._cuts.clear()
            self._cuts[key] = cuts
        if not _fit(cuts, outside):
            turn = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
            reason = "the template's own text around it depends on the words of other messages"
            raise SpanError(reason, message=turn, excerpt=excerpt("".join(outside), len(outside[0])))
        return cuts

    def _find(self, messages: list[Message], tools: Tools, shapes: tuple[Shape, ...], marker: Marker) -> list[Cut]:
        messages_of_marks = [marker.put(message, index) for index, message in enumerate(messages)]
        marked = marker.read(self._render(messages_of_marks, tools, False))
        cuts = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            runs = [k for k, run in enumerate(marked.runs) if run.message == index]
            if not runs:
                raise SpanError("the template leaves it out", message=index, excerpt=marked.excerpt(0))
            recent = shapes[max(0, index - CONTEXT_MESSAGES) : index + 1]
            turn = _Turn(
                messages=messages_of_marks, tools=tools, index=index, marked=marked, k=runs[0],
                context=(recent, index > CONTEXT_MESSAGES, shapes[0][0], bool(tools)),
            )  # fmt: skip
            if len(runs) > 1:
                raise turn.refused("words of other messages stand between its words")
            cuts.append(self._cut(turn, marker))
        return cuts

    def _cut(self, turn: _Turn, marker: Marker) -> Cut:
        header = turn.marked.before(turn.k)
        lead, given = self._begin(turn, header, marker)
        stop, is_missing = self._end(turn, turn.marked.behind(turn.k), marker)
        return Cut(header=header, lead=lead, given=given, stop=stop, is_missing=is_missing)

    def _begin(self, turn: _Turn, header: str, marker: Marker) -> tuple[int, str]:
        """`lead` and `given` of the turn."""
        before = turn.messages[: turn.index]

        def render_prompt() -> tuple[str, str]:
            with_prompt, without = (self._render(before, turn.tools, ask) for ask in (True, False))
            return marker.read(with_prompt).tail, marker.read(without).tail

        try:
            prompt, unasked = self._remembered("begin", turn, render_prompt)
        except TemplateError:
            if before:
                raise
            return 0, ""  # The conversation opens with the assistant, and this template has no prompt for that.
        if header.startswith(prompt):
            written = header[len(prompt) :]
            if prompt == unasked and written.strip() and self._lacks_generation_prompt(marker):
                raise turn.refused(
                    f"the template writes {written!r} before it, but not when it is asked for a generation prompt, "
                    "so at inference the model would not be given it"
                )
            return len(written), ""
        if prompt.startswith(header):
            return 0, prompt[len(header) :]
        # A prompt may open a block such as <think> that this turn does not have, or has empty; no more may differ.
        shared = self._shared(prompt, header)
        opened = prompt[len(shared) :]
        if not self._special.search(opened) and not self._kept.sub("", opened).strip():
            return len(header) - len(shared), ""
        raise turn.refused(f"the template writes {header!r} before it, but gives {prompt!r} as the prompt for it")

    def _end(self, turn: _Turn, behind: str, marker: Marker) -> tuple[str, bool]:
        """`stop` and `is_missing` of the turn."""
        so_far = turn.messages[: turn.index + 1]

        def render_endings() -> tuple[str, str]:
            closed = marker.read(self._render(so_far, turn.tools, False)).tail
            user = marker.put({"role": "user", "content": ""}, turn.index + 1)
            try:
                followed = marker.read(self._render([*so_far, user], turn.tools, False))
            except TemplateError:
                return closed, closed
            own = [k for k, run in enumerate(followed.runs) if run.message == turn.index]
            return closed, followed.behind(own[-1]) if own else closed

        closed, followed = self._remembered("end", turn, render_endings)
        if always := self._special.findall(self._shared(closed, followed)):
            return always[-1], False
        next_token = self._special.search(behind)
        if next_token and (self._special.search(closed) or next_token[0] in self._end_tokens):
            return next_token[0], False
        opens_next = self._special.match(followed)
        if not behind.strip() and opens_next and opens_next[0] in self._end_tokens:
            return self._end_tokens[0], True
        raise turn.refused("the template puts no special token behind it, so the model would never learn to stop")

    def _lacks_generation_prompt(self, marker: Marker) -> bool:
        """Whether the template writes something before the plainest of answers that it never gives as a prompt."""
        if self._is_unprompted is None:
            user, answer = ({"role": role, "content": ""} for role in ("user", "assistant"))
            messages = [marker.put(user, 0), marker.put(answer, 1)]
            try:
                prompt, unasked = (marker.read(self._render(messages[:1], None, ask)).tail for ask in (True, False))
                header = marker.read(self._render(messages, None, False)).before(1)
                self._is_unprompted = prompt == unasked and bool(header.removeprefix(prompt).strip())
            except TemplateError:
                self._is_unprompted = False
        return self._is_unprompted

    def _remembered(self, what: str, turn: _Turn, find: Callable[[], tuple[str, str]]) -> tuple[str, str]:
        key = (what, turn.context)
        if key not in self._literals:
            if len(self._literals) >= MAX_REMEMBERED:
                self._literals.clear()
            self._literals[key] = find()
        return self._literals[key]

    def _shared(self, one: str, other: str) -> str:
        """The common beginning of two literal texts, in whole added tokens, line ends, and texts between them."""
        shared = ""
        for a, b in zip(self._piece.split(one), self._piece.split(other), strict=False):
            if a != b:
                break
            shared += a
        return shared


def _fit(cuts: list[Cut], outside: list[str]) -> bool:
    """Whether the literal texts of the cuts stand around the turns of this conversation."""
    last = len(cuts) - 1
    return all(
        outside[k].endswith(cut.header) and (cut.stop in outside[k + 1] or (k == last and cut.is_missing))
        for k, cut in enumerate(cuts)
    )
