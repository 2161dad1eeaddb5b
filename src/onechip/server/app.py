"""The application: which path is served by what, behind which checks.

Routes: POST /v1/chat/completions, /v1/chat/completions/render, /v1/completions, /v1/responses, /v1/messages,
/v1/messages/count_tokens, /tokenize, /detokenize; GET and DELETE /v1/responses/{id}; GET
/v1/responses/{id}/input_items, /v1/models, /v1/models/{id}, /health, /health/live, /health/ready, /ping, /metrics,
/version, and the web page (`server.web`) at /. With API keys every path needs one except OPEN_PATHS, the page's and
preflights. From the outside in: the journal (request ids, log, traces), CORS, API keys, the routes.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from onechip import __version__
from onechip.chat.controls import controls_of
from onechip.chat.template import ChatTemplate
from onechip.chat.tokenizer import Tokenizer
from onechip.config import ServerConfig
from onechip.engine.validate import check_ids
from onechip.errors import InvalidRequest, OnechipError
from onechip.server import messages, responses, schema
from onechip.server.generation import EngineClient
from onechip.server.http import RETRY_AFTER_S, ApiKeys, json_response, on_error, read_json
from onechip.server.journal import Journal, Tracing
from onechip.server.metrics import Metrics
from onechip.server.responses_store import ResponseStore
from onechip.server.routes import (
    PLACEHOLDERS,
    Service,
    chat_completions,
    completions,
    render_chat,
)
from onechip.server.tooling import declared_tools
from onechip.server.web import STATUS_PATH, page_files, page_routes

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/ping", "/metrics")

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    config: ServerConfig,
    model_name: str,
    eos_ids: Sequence[int],
    generation_defaults: Mapping[str, Any],
    tracing: Tracing | None = None,
) -> ASGIApp:
    """The ASGI application over an engine client. `generation_defaults`: the checkpoint's generation_config."""
    names = config.served_model_names or (model_name,)
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        config=config,
        model_names=names,
        eos_ids=tuple(eos_ids),
        defaults=sampling_defaults(generation_defaults),
        started=int(time.time()),
        metrics=Metrics(lambda: engine.stats, lambda: engine.info, lambda: engine.alive, names[0]),
        placeholder_ids=frozenset(
            i for i in tokenizer.special_ids if tokenizer.piece_bytes(i) in PLACEHOLDERS
        ),
        controls=controls_of(tokenizer),
    )
    kinds = (OnechipError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(
        routes=_routes(service),
        middleware=_middleware(config),
        exception_handlers=dict.fromkeys(kinds, on_error),
    )
    app.router.redirect_slashes = False  # //v1/models is not /v1/models
    return Journal(app, (*OPEN_PATHS, STATUS_PATH), tracing, access_log=config.access_log)


def _middleware(config: ServerConfig) -> list[Middleware]:
    layers: list[Middleware] = []
    if config.cors:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins or ("*",),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if config.api_keys:
        open_paths = (*OPEN_PATHS, STATUS_PATH, *(file.path for file in page_files()))
        layers.append(Middleware(ApiKeys, keys=config.api_keys, open_paths=open_paths))
    return layers


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling values of a generation_config.json that apply unless a request says otherwise."""
    return {
        name: float(value) if name != "top_k" else int(value)
        for name in schema.DEFAULTED
        if (value := generation_config.get(name)) is not None
    }


def _routes(service: Service) -> list[Route]:
    limits = service.config
    store = ResponseStore(limits.stored_responses, limits.stored_responses_bytes)
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", chat_completions),
        ("POST", "/v1/chat/completions/render", render_chat),
        ("POST", "/v1/completions", completions),
        ("POST", "/v1/messages", messages.messages),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("POST", "/v1/responses", partial(responses.create, store)),
        ("GET", "/v1/responses/{response_id}", partial(responses.retrieve, store)),
        ("DELETE", "/v1/responses/{response_id}", partial(responses.delete, store)),
        ("GET", "/v1/responses/{response_id}/input_items", partial(responses.list_input, store)),
        ("POST", "/tokenize", tokenize),
        ("POST", "/detokenize", detokenize),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{name:path}", model),
        ("GET", "/health", health),
        ("GET", "/health/ready", health),
        ("GET", "/health/live", live),
        ("GET", "/ping", health),
        ("GET", "/metrics", metrics),
        ("GET", "/version", version),
    ]
    api = [
        Route(path, partial(handler, service), methods=[method]) for method, path, handler in table
    ]
    return [*api, *page_routes(service)]


async def tokenize(service: Service, request: Request) -> Response:
    """vLLM's shape: a prompt or messages to ids."""
    raw = await read_json(request, service.config.max_body_bytes)
    body = schema.parse(schema.TokenizeBody, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        ids = service.encode_chat(
            body.messages,
            tools=declared_tools(body.tools),
            variables=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
        )
    else:
        ids = service.encode_text(body.prompt or "", add_special_tokens=body.add_special_tokens)
    pieces = [service.tokenizer.piece_bytes(i).decode(errors="replace") for i in ids]
    return json_response(
        {
            "count": len(ids),
            "max_model_len": service.engine.info.max_model_len if service.engine.info else None,
            "tokens": ids,
            "token_strs": pieces if body.return_token_strs else None,
        }
    )


async def detokenize(service: Service, request: Request) -> Response:
    """vLLM's shape: ids to text, special tokens included."""
    raw = await read_json(request, service.config.max_body_bytes)
    body = schema.parse(schema.DetokenizeBody, raw)
    service.check_model(body.model)
    check_ids("tokens", body.tokens, service.tokenizer.vocab_size)
    return json_response({"prompt": service.tokenizer.decode(body.tokens, skip_special=False)})


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "onechip",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": None if info is None else info.max_model_len,
    }


async def models(service: Service, _: Request) -> Response:
    data = [_card(service, name) for name in service.model_names]
    return json_response({"object": "list", "data": data})


async def model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


async def health(service: Service, _: Request) -> Response:
    """Readiness. 200 when a request would be taken now: the engine has generated a token, lives, and does not drain."""
    if service.ready:
        return json_response({"status": "ready"})
    return _unready(service)


async def live(service: Service, _: Request) -> Response:
    """Liveness. 503 only when restarting the process is the remedy: its engine is dead."""
    dead = service.engine.info is not None and not service.engine.alive
    return _unready(service) if dead else json_response({"status": "live"})


def _unready(service: Service) -> Response:
    state = "starting" if service.engine.info is None else "dead"
    state = "draining" if service.engine.draining and service.engine.alive else state
    response = json_response({"status": state}, 503)
    response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


async def metrics(service: Service, _: Request) -> Response:
    return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(service: Service, _: Request) -> Response:
    return json_response({"version": __version__})
