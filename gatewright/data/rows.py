"""The kinds of row that data may hold, and the check that a value read from a file is one of them."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gatewright.spec.errors import DataError

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
MAX_SHOWN = 80
"""Characters of a wrong value that are shown."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: `data/judge.jsonl:17`, or `data/judge.parquet row 17` where a file has no lines."""

    file: str
    number: int
    """Counted from 1."""
    is_line: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.is_line else f"{self.file} row {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages for the chat template; assistant turns from message `trained_from` on carry loss."""

    place: Place
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    trained_from: int = 0

    @property
    def characters(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A prompt that is read and a completion that is learnt, without a chat template."""

    place: Place
    prompt: str
    completion: str

    @property
    def characters(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainText:
    """Text that is learnt from its first token to its last."""

    place: Place
    text: str

    @property
    def characters(self) -> int:
        return len(self.text)


Row = Conversation | Completion | PlainText


def parse_row(value: object, place: Place) -> Row:
    """The row that a decoded JSON value is. Raises DataError with the place for anything else."""
    if not isinstance(value, dict):
        raise DataError(f'{place}: a row must be an object such as {{"messages": [...]}}, got {shown(value)}')
    if "messages" in value:
        return _conversation(value["messages"], value.get("tools"), place)
    if "prompt" in value and "completion" in value:
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(place=place, prompt=prompt, completion=completion)
        if isinstance(prompt, list) and isinstance(completion, list):
            return _conversation(prompt + completion, value.get("tools"), place, trained_from=len(prompt))
        raise DataError(
            f"{place}: prompt and completion must both be texts or both be lists of messages, got {shown(prompt)} "
            f"and {shown(completion)}"
        )
    if "text" in value:
        if not isinstance(value["text"], str):
            raise DataError(f"{place}: text must be a text, got {shown(value['text'])}")
        return PlainText(place=place, text=value["text"])
    raise DataError(
        f"{place}: no messages, no prompt with completion, and no text; the row has "
        f"{', '.join(map(str, value)) or 'no keys'}{_likely_meant(value)}"
    )


def _conversation(value: object, tools: object, place: Place, *, trained_from: int = 0) -> Conversation:
    if not isinstance(value, list) or not value:
        wanted = "a list of messages with at least one"
        raise DataError(f"{place}: messages must be {wanted}, got {shown(value)}")
    messages = [_message(message, f"{place}: message {index}") for index, message in enumerate(value, start=1)]
    return Conversation(place=place, messages=messages, tools=_tools(tools, place), trained_from=trained_from)


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f'{where} must be an object such as {{"role": "user", "content": "..."}}, got {shown(value)}')
    role = value.get("role")
    if not isinstance(role, str):
        has = f"it has {', '.join(map(str, value)) or 'no keys'}" if "role" not in value else f"got {shown(role)}"
        raise DataError(f"{where} needs a role ({', '.join(ROLES[:5])}); {has}")
    if role not in ROLES:
        near = difflib.get_close_matches(role.lower(), ROLES, n=1) or [{"human": "user"}.get(role.lower(), "assistant")]
        raise DataError(f"{where} has the role {role!r}; wanted {', '.join(ROLES[:5])}; did you mean {near[0]}?")
    message = {key: part for key, part in value.items() if part is not None}
    message["content"] = _content(value.get("content"), where)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = _tool_calls(calls, where)
    else:
        message.pop("tool_calls", None)
    return message


def _content(content: object, where: str) -> str:
    """The content as one text: no content is the empty text, and parts that are texts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {str(part.get("type")) for part in content}
        if kinds <= {"text"} and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        if kinds - {"text"}:
            raise DataError(f"{where} has content of type {', '.join(sorted(kinds - {'text'}))}; only text is trained")
    raise DataError(f"{where} has a content that is {shown(content)}; wanted a text")


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise DataError(f"{where} has tool_calls that are {shown(calls)}; wanted a list")
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where} has the tool call {shown(call)}; wanted "
                '{"type": "function", "function": {"name": "...", "arguments": {...}}}'
            )
        arguments = function.get("arguments", {})
        if not isinstance(arguments, dict) and _json_object(arguments) is None:
            raise DataError(f"{where} calls {function['name']} with arguments {shown(arguments)}; wanted an object")
    return calls


def _tools(tools: object, place: Place) -> list[dict[str, Any]] | None:
    """Tool schemas: a list, or the JSON text of one, which is how tables store lists of unlike objects."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise DataError(f"{place}: tools is a text but not JSON: {shown(tools)}") from None
    if tools is None or tools == []:
        return None
    if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools):
        return tools
    raise DataError(f"{place}: tools must be a list of JSON schemas, got {shown(tools)}")


def _json_object(text: object) -> dict[str, Any] | None:
    if not isinstance(text, str):
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _likely_meant(row: Mapping[str, object]) -> str:
    if "conversations" in row:
        return ': rename conversations to messages, "from" to "role" and "value" to "content"'
    if "chosen" in row and "rejected" in row:
        return ": these are preference pairs, which sft does not train on"
    for key in row:
        if near := difflib.get_close_matches(str(key).lower(), ("messages", "prompt", "completion", "text"), n=1):
            return f": did you mean {near[0]} by {key}?" if near[0] not in row else ""
    return ""


def shown(value: object) -> str:
    """A wrong value in a few words: what kind of thing it is and how it begins."""
    kind = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number" if isinstance(value, int | float) else type(value).__name__
    )
    if value is None or value in ([], {}, ""):
        return kind if value is None else f"an empty {kind.split()[-1]}"
    return f"{kind}: {shortened(json.dumps(value, ensure_ascii=False, default=str))}"


def shortened(text: str, *, limit: int = MAX_SHOWN) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
