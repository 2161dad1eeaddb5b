"""OpenAI's Responses routes, over the same chat as chat completions.

1. POST /v1/responses: a previous response's conversation, if one is named, and this request's input become a `ChatBody`
   (`responses_body`); a chat generation is made of it (`routes`) and written as a response (`responses_shape`).
2. When it is complete, whole or streamed, it is stored with its conversation unless store is false.
3. GET and DELETE /v1/responses/{id} read and forget what is stored; GET .../input_items lists what it was asked.
"""

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onechip.server import schema
from onechip.server.http import json_response, read_json
from onechip.server.responses_body import ResponsesBody, chat_body, input_items
from onechip.server.responses_shape import ResponseWriter
from onechip.server.responses_store import ResponseStore, Stored
from onechip.server.routes import Service, chat_generation


async def create(store: ResponseStore, service: Service, http: Request) -> Response:
    raw = await read_json(http, service.config.max_body_bytes)
    body = schema.parse(ResponsesBody, raw)
    conversation = [*_earlier(store, body.previous_response_id), *input_items(body)]
    name = f"resp_{uuid.uuid4().hex}"
    chat = chat_body(body, conversation)
    generation = await chat_generation(service, http, chat, len(raw), name)

    def done(response: dict[str, Any]) -> None:
        if body.store is not False:
            store.put(Stored(response, (*conversation, *response["output"])))

    writer = ResponseWriter(generation, body, name, done)
    return service.answer(generation, writer, stream=bool(body.stream))


def _earlier(store: ResponseStore, previous: str | None) -> tuple[dict[str, Any], ...]:
    return () if previous is None else store.get(previous, "previous_response_id").conversation


async def retrieve(store: ResponseStore, _: Service, http: Request) -> Response:
    return json_response(store.get(http.path_params["response_id"]).response)


async def delete(store: ResponseStore, _: Service, http: Request) -> Response:
    response_id = http.path_params["response_id"]
    store.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input(store: ResponseStore, _: Service, http: Request) -> Response:
    """The conversation before the answer, oldest first, in one page."""
    found = store.get(http.path_params["response_id"])
    items = found.conversation[: len(found.conversation) - len(found.response["output"])]
    data = [{"id": f"item_{number}", **item} for number, item in enumerate(items)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return json_response({"object": "list", "data": data, "has_more": False, **ends})
