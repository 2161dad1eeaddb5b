"""OpenAI's Responses answers: a response of output items, in one piece or as events.

    response.created, response.in_progress,
    then for each item output_item.added, its deltas between content_part.added and .done (of a call:
    function_call_arguments.delta and .done), output_item.done,
    then response.completed, response.incomplete (the token limit) or response.failed

Every event has a sequence number. A thought is a reasoning item with its text; nothing is summarised or encrypted. What
a stream ends with, what is returned in one piece and what is stored are the same object.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from onechip.chat.output import Delta
from onechip.errors import OnechipError
from onechip.request import SamplingParams
from onechip.server.answer import PING, Whole, encode, usage_of
from onechip.server.generation import Choice, Generation
from onechip.server.items import Change, Item, Items, whole_items
from onechip.server.responses_body import ResponsesBody

PREFIXES = {"thought": "rs_", "text": "msg_", "call": "fc_"}


class ResponseWriter:
    """The one choice of a generation as a response. `done` is told the response when it is complete."""

    ping = PING

    def __init__(
        self,
        generation: Generation,
        body: ResponsesBody,
        response_id: str,
        done: Callable[[dict[str, Any]], None],
    ):
        self._generation = generation
        self._done = done
        self._items = Items()
        self._ids: dict[Item, str] = {}
        self._finish: str | None = None
        self._number = 0
        self._response = skeleton(body, generation.choices[0].request.sampling, response_id)

    def opening(self) -> bytes:
        return self._event("created", response=self._response) + self._event(
            "in_progress", response=self._response
        )

    def deltas(self, deltas: Sequence[tuple[Choice, Delta]]) -> bytes:
        return b"".join(event for _, delta in deltas for event in self._delta(delta))

    def _delta(self, delta: Delta) -> Iterator[bytes]:
        yield from self._changes(self._items.add(delta.pieces))
        if delta.finish is not None:
            self._finish = delta.finish
            yield from self._changes(self._items.end(cut=delta.finish == "length"))

    def closing(self) -> bytes:
        response = self._completed(self._items.all, self._finish)
        return self._event(response["status"], response=response)

    def failure(self, error: OnechipError) -> bytes:
        told = {"code": error.code or "server_error", "message": error.message}
        output = [self._item(item) for item in self._items.all]
        response = self._response | {"status": "failed", "error": told, "output": output}
        return self._event("failed", response=response)

    def whole(self, said: list[tuple[Choice, Whole]]) -> dict[str, Any]:
        ((_, one),) = said
        return self._completed(whole_items(one.parts, cut=one.finish == "length"), one.finish)

    def _completed(self, items: Iterable[Item], finish: str | None) -> dict[str, Any]:
        cut = finish == "length"
        response = self._response | {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(item) for item in items],
            "usage": response_usage(self._generation),
        }
        self._done(response)
        return response

    def _changes(self, changes: Iterable[Change]) -> Iterator[bytes]:
        for change in changes:
            item = change.item
            match change.what:
                case "start":
                    yield from self._started(item)
                case "more":
                    yield self._item_event(f"{STREAMED[item.kind]}.delta", item, delta=change.text)
                case "end":
                    yield from self._ended(item)

    def _started(self, item: Item) -> Iterator[bytes]:
        shown = self._item(item, status="in_progress") | _empty(item)
        yield self._event("output_item.added", output_index=item.index, item=shown)
        if item.kind != "call":
            yield self._item_event("content_part.added", item, part=_part(item))

    def _ended(self, item: Item) -> Iterator[bytes]:
        text = {"arguments" if item.kind == "call" else "text": item.text}
        yield self._item_event(f"{STREAMED[item.kind]}.done", item, **text)
        if item.kind != "call":
            yield self._item_event("content_part.done", item, part=_part(item))
        yield self._event("output_item.done", output_index=item.index, item=self._item(item))

    def _item_event(self, name: str, item: Item, **fields: Any) -> bytes:
        """An event inside an item. Text events carry log probabilities by contract; they are never asked for here."""
        place: dict[str, Any] = {"item_id": self._id(item), "output_index": item.index}
        if item.kind != "call":
            place["content_index"] = 0
        if name.startswith("output_text"):
            place["logprobs"] = []
        if name == "function_call_arguments.done":
            place["name"] = item.name
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        kind = f"response.{name}"
        body = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(body))

    def _id(self, item: Item) -> str:
        if item not in self._ids:
            self._ids[item] = PREFIXES[item.kind] + uuid.uuid4().hex
        return self._ids[item]

    def _item(self, item: Item, status: str = "") -> dict[str, Any]:
        status = status or ("completed" if item.ended else "incomplete")
        shown = {"id": self._id(item), "status": status}
        match item.kind:
            case "thought":
                return shown | {"type": "reasoning", "summary": [], "content": [_part(item)]}
            case "text":
                return shown | {"type": "message", "role": "assistant", "content": [_part(item)]}
            case "call":
                call = {"call_id": item.id, "name": item.name, "arguments": item.text}
                return shown | {"type": "function_call", **call}


STREAMED = {
    "thought": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


def _part(item: Item) -> dict[str, Any]:
    if item.kind == "thought":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": []}


def _empty(item: Item) -> dict[str, Any]:
    """What an item that has just begun shows instead of its content."""
    return {"arguments": ""} if item.kind == "call" else {"content": []}


def skeleton(body: ResponsesBody, sampling: SamplingParams, response_id: str) -> dict[str, Any]:
    """A response that has not begun: it repeats what was asked for, as OpenAI's does."""
    asked = body.model_dump(exclude_none=True, by_alias=True)
    text = asked.get("text") or {}
    reasoning = asked.get("reasoning") or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [{"strict": None, **tool} for tool in asked.get("tools", [])],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def response_usage(generation: Generation) -> dict[str, Any]:
    usage = usage_of(generation)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
