"""Anthropic's answers: a message of content blocks, in one piece or as events.

    message_start, then for each block content_block_start, content_block_delta..., content_block_stop,
    then message_delta (stop reason, usage) and message_stop

An error after the first byte is an `error` event and the end. A call that the token limit cut off has no valid input:
in one piece it is a text block with the arguments as far as they came, never a tool_use that looks complete.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from onechip.chat.output import Delta
from onechip.errors import OnechipError
from onechip.server.answer import Whole, encode, usage_of
from onechip.server.generation import Choice, Generation
from onechip.server.http import anthropic_error_body
from onechip.server.items import Change, Item, Items, whole_items

SIGNATURE = "unsigned"  # clients want one beside a thought; nothing here checks it
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def event(name: str, body: dict[str, Any]) -> bytes:
    """One named server-sent event, whose data repeats the name as `type`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **body}))


class MessageWriter:
    """The one choice of a generation as an Anthropic message."""

    ping = event("ping", {})

    def __init__(self, generation: Generation, message_id: str, model: str, request_id: str):
        self._generation = generation
        self._request_id = request_id
        self._identity = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._items = Items()
        self._finish: str | None = None

    def opening(self) -> bytes:
        empty = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = self._identity | empty | {"usage": self._usage()}
        return event("message_start", {"message": message})

    def deltas(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        return b"".join(self._delta(delta) for _, delta in deltas)

    def _delta(self, delta: Delta) -> bytes:
        said = b"".join(_events(self._items.add(delta.pieces)))
        if delta.finish is None:
            return said
        self._finish = delta.finish
        return said + b"".join(_events(self._items.end(cut=delta.finish == "length")))

    def closing(self) -> bytes:
        end = {"delta": self._stop(self._finish), "usage": self._usage()}
        return event("message_delta", end) + event("message_stop", {})

    def failure(self, error: OnechipError) -> bytes:
        return event("error", anthropic_error_body(error, self._request_id))

    def whole(self, said: list[tuple[Choice, Whole]]) -> dict[str, Any]:
        ((_, one),) = said
        items = whole_items(one.parts, cut=one.finish == "length")
        content = [_block(item) for item in items]
        return (
            self._identity | self._stop(one.finish) | {"content": content, "usage": self._usage()}
        )

    def _stop(self, finish: str | None) -> dict[str, Any]:
        found = self._generation.choices[0].output.stop_reason
        if finish == "stop" and isinstance(found, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": STOP_REASONS.get(finish or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Anthropic counts what came from the cache apart."""
        usage = usage_of(self._generation)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _events(changes: Iterable[Change]) -> Iterator[bytes]:
    for change in changes:
        item, index = change.item, {"index": change.item.index}
        match change.what:
            case "start":
                yield event("content_block_start", index | {"content_block": _opened(item)})
            case "more":
                yield event("content_block_delta", index | {"delta": _more(item, change.text)})
            case "end":
                if item.kind == "thought":
                    signed = {"type": "signature_delta", "signature": SIGNATURE}
                    yield event("content_block_delta", index | {"delta": signed})
                yield event("content_block_stop", index)


def _opened(item: Item) -> dict[str, Any]:
    match item.kind:
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "call":
            return {"type": "tool_use", "id": item.id, "name": item.name, "input": {}}


def _more(item: Item, text: str) -> dict[str, Any]:
    match item.kind:
        case "thought":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _block(item: Item) -> dict[str, Any]:
    match item.kind:
        case "thought":
            return {"type": "thinking", "thinking": item.text, "signature": SIGNATURE}
        case "text":
            return {"type": "text", "text": item.text}
        case "call":
            try:
                arguments = json.loads(item.text)
            except ValueError:
                return {"type": "text", "text": f"{item.name}({item.text}"}
            return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments}
