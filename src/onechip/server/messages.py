"""Anthropic's routes: POST /v1/messages and /v1/messages/count_tokens, over the same chat as OpenAI's.

A body becomes a `ChatBody` (`messages_body`), a chat generation is made of it (`routes`), and its answer is written as
a message (`messages_shape`). The anthropic-version and anthropic-beta headers are accepted and mean nothing here.
"""

import uuid

from starlette.requests import Request
from starlette.responses import Response

from onechip.server import schema
from onechip.server.http import json_response, read_json
from onechip.server.journal import record_of
from onechip.server.messages_body import CountBody, MessagesBody, chat_body
from onechip.server.messages_shape import MessageWriter
from onechip.server.routes import Service, chat_generation, chat_prompt
from onechip.server.tooling import tool_use


async def messages(service: Service, http: Request) -> Response:
    raw = await read_json(http, service.config.max_body_bytes)
    body = schema.parse(MessagesBody, raw)
    name = f"msg_{uuid.uuid4().hex}"
    generation = await chat_generation(service, http, chat_body(body), len(raw), name)
    writer = MessageWriter(generation, name, body.model, record_of(http.scope).request_id)
    return service.answer(generation, writer, stream=bool(body.stream))


async def count_tokens(service: Service, http: Request) -> Response:
    """How many tokens the prompt would have; nothing is generated."""
    raw = await read_json(http, service.config.max_body_bytes)
    body = chat_body(schema.parse(CountBody, raw))
    service.check_model(body.model)
    ids = await chat_prompt(service, body, tool_use(body), len(raw))
    return json_response({"input_tokens": len(ids)})
