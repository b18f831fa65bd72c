"""Finds which characters of a rendered conversation the model itself must write, and proves it for every row.

For a conversation of which a chat template makes the text R:

1. Render it again with the assistant's words replaced by marks. What stands between the marks, the *outside*, must
   stand in R too, in the same order and in one way only; what is left of R are the assistant's words. A template that
   drops, moves, repeats or alters them fails here. This is done for every row.
2. The literal text of the template on both sides of the words is partly the model's: see `cuts`.
"""

from dataclasses import dataclass

from gatewright.data.cuts import CutFinder, Render, SpanError, Tools
from gatewright.data.marks import REASONING, MarkedText, Marker, excerpt, keep_pattern, words_of
from gatewright.data.rows import Message


@dataclass(frozen=True, slots=True)
class Span:
    """Characters [begin, end) of a text."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text, and the parts of it that the model writes."""

    text: str
    spans: list[Span]
    """One for each turn that is trained, up to and including the token that ends it."""
    words: list[Span]
    """The part of each span that comes from the message and not from the template."""
    dropped_reasoning: int
    """Turns before the last whose reasoning the template left out, as such templates do at inference too."""


class SpanFinder:
    """Spans of the assistant's turns under one chat template."""

    def __init__(
        self, render: Render, *, special_tokens: list[str], added_tokens: list[str], end_tokens: list[str]
    ) -> None:
        """Of the tokenizer's `added_tokens`, the `special_tokens` may end a turn, and `end_tokens` stop generation."""
        self._render = render
        self._kept = keep_pattern(added_tokens)
        self._cuts = CutFinder(render, special_tokens=special_tokens, end_tokens=end_tokens, kept=self._kept)

    def find(self, messages: list[Message], tools: Tools, *, trained_from: int = 0) -> Rendered:
        """The text of a conversation, and the span of each assistant turn from message `trained_from` on.

        Raises SpanError when a turn cannot be told from the rest, TemplateError when the template refuses the messages.
        """
        text = self._render(messages, tools, False)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            return Rendered(text=text, spans=[], words=[], dropped_reasoning=0)
        marker, outside, words = self._words(messages, tools, turns, text)
        cuts = self._cuts.of_conversation(messages, tools, marker, outside)
        if cuts[-1].is_missing:
            outside[-1] += cuts[-1].stop
            text += cuts[-1].stop

        spans: list[Span] = []
        trained: list[Span] = []
        dropped_reasoning = 0
        for turn, cut, own, behind in zip(turns, cuts, words, outside[1:], strict=True):
            if turn >= trained_from:
                given = len(cut.given) if text.startswith(cut.given, own.begin) else 0
                end = own.end + behind.index(cut.stop) + len(cut.stop)
                spans.append(Span(own.begin - cut.lead + given, end))
                trained.append(own)
                dropped_reasoning += self._check_words(messages, turn, text, spans[-1])
        return Rendered(text=text, spans=spans, words=trained, dropped_reasoning=dropped_reasoning)

    def _words(
        self, messages: list[Message], tools: Tools, turns: list[int], text: str
    ) -> tuple[Marker, list[str], list[Span]]:
        """The outside (a text before each turn, and one behind the last), and the words between them in `text`."""
        marker = Marker(unlike=text, kept=self._kept)
        shown = [marker.put(m, i) if m["role"] == "assistant" else m for i, m in enumerate(messages)]
        outside = self._outside(messages, turns, marker.read(self._render(shown, tools, False)), marker)
        return marker, outside, _align(text, outside, turns)

    def _outside(self, messages: list[Message], turns: list[int], marked: MarkedText, marker: Marker) -> list[str]:
        for turn in turns:
            # Near where it should stand: its own words if some are shown, or else those that follow.
            near = sum(run.message < turn for run in marked.runs)
            if fault := marker.fault(messages[turn], turn, marked):
                raise SpanError(f"the template {fault}", message=turn, excerpt=marked.excerpt(near))
            if all(run.message != turn for run in marked.runs):
                raise SpanError("the template leaves it out", message=turn, excerpt=marked.excerpt(near))
        for k, (run, turn) in enumerate(zip(marked.runs, turns, strict=False)):
            if run.message != turn:
                reason = "the template changes the order of the turns"
                raise SpanError(reason, message=turn, excerpt=marked.excerpt(k))
        return [marked.before(k) for k in range(len(turns))] + [marked.tail]

    def _check_words(self, messages: list[Message], turn: int, text: str, span: Span) -> int:
        """Makes sure that the words stand in the span as they are; 1 if the reasoning of an earlier turn does not."""
        written, dropped = text[span.begin : span.end], 0
        for part, words in words_of(messages[turn], self._kept):
            if words in written:
                continue
            if part == REASONING and any(later["role"] == "assistant" for later in messages[turn + 1 :]):
                dropped = 1
                continue
            what = "leaves out its reasoning" if part == REASONING else f"alters or leaves out its words {words[:40]!r}"
            raise SpanError(f"the template {what}", message=turn, excerpt=excerpt(text, span.begin))
        return dropped


def _align(text: str, outside: list[str], turns: list[int]) -> list[Span]:
    """What stands in `text` between the outside texts, which must cover it from end to end, and in one way only."""
    first, *between, last = outside
    begins, ends = [len(first)], [len(text) - len(last)]
    if not text.startswith(first) or not text.endswith(last) or begins[0] > ends[0]:
        raise _moved(text, turns[0] if not text.startswith(first) else turns[-1], begins[0])
    for piece, turn in zip(between, turns, strict=False):
        at = text.find(piece, begins[-1])
        if at < 0 or at + len(piece) > ends[0]:
            raise _moved(text, turn, begins[-1])
        begins.append(at + len(piece))
    for piece in reversed(between):
        ends.insert(0, text.rfind(piece, begins[0], ends[0]))
    for turn, begin, end, piece in zip(turns[1:], begins[1:], ends[:-1], between, strict=True):
        if end + len(piece) != begin:
            reason = "its beginning can be found in two places, since an answer repeats the text before it"
            raise SpanError(reason, message=turn, excerpt=excerpt(text, begin))
    return [Span(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _moved(text: str, turn: int, at: int) -> SpanError:
    reason = "the text around it is not the same when the assistant's words are replaced by others"
    return SpanError(reason, message=turn, excerpt=excerpt(text, at))
