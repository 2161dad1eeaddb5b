"""The generating routes: a body becomes prompts, prompts become engine requests, and their text an answer.

It owns the order of the checks (fields, model, prompt, context), so that each mistake gets the same answer on both
routes, whole or streamed. It knows no events and no JSON of answers.
"""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from onechip.chat.controls import Control, prompt_end
from onechip.chat.template import ChatTemplate
from onechip.chat.tokenizer import Tokenizer
from onechip.config import ServerConfig
from onechip.engine.validate import prepare
from onechip.errors import EngineDead, InvalidRequest, UnknownModel
from onechip.request import EngineInfo, SamplingParams
from onechip.server import schema
from onechip.server.answer import Chunks, Shape, StreamedAnswer, WholeAnswer, Writer
from onechip.server.generation import Choice, EngineClient, Generation
from onechip.server.http import json_response, read_json
from onechip.server.journal import record_of
from onechip.server.metrics import Metrics
from onechip.server.shapes import ChatShape, CompletionShape
from onechip.server.structure import chat_grammar, wish_of
from onechip.server.tooling import ToolUse, template_variables, tool_use

T = TypeVar("T")

SLOW_TEXT = 20_000  # characters from which tokenising (milliseconds) leaves the event loop
PLACEHOLDERS = frozenset({b"<|image|>", b"<|audio|>", b"<|video|>"})  # Gemma 4's soft tokens


@dataclass(frozen=True)
class Service:
    """What every route needs. `model_names`: the first is the one answers and lists show by default."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    config: ServerConfig
    model_names: tuple[str, ...]
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    started: int
    metrics: Metrics
    placeholder_ids: frozenset[int]
    controls: Mapping[int, Control]

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise UnknownModel(
                f"the model {name!r} does not exist here; served: {served}", param="model"
            )

    def ready_info(self) -> EngineInfo:
        info = self.engine.info
        if info is None or not self.engine.alive:
            raise EngineDead("the engine is not up (starting, or gone); see /health")
        return info

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.engine.alive and not self.engine.draining

    def answer(self, generation: Generation, writer: Writer, *, stream: bool) -> Response:
        if stream:
            return StreamedAnswer(generation, writer, self.config.ping_seconds)
        return WholeAnswer(generation, writer)

    def generation(
        self,
        http: HttpRequest,
        operation: str,
        name: str,
        body: schema.Sampling,
        params: SamplingParams,
        choices: Sequence[Choice],
        prompt_tokens: int,
    ) -> Generation:
        """The Generation of a checked request, with its time limit, and its Record told what it is."""
        record = record_of(http.scope)
        record.operation, record.answer_id, record.model = operation, name, body.model
        record.sampling, record.stream = params, bool(body.stream)
        limit_s = schema.time_limit(body, self.config.request_timeout)
        return Generation(self.engine, self.metrics, choices, prompt_tokens, record, limit_s)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text prompt, whose control text is meant as such; one BOS unless it has one or none is wanted."""
        ids = self.tokenizer.encode(text, control=True)
        starts = ids[:1] == [self.tokenizer.bos_id]
        return ids if starts or not add_special_tokens else [self.tokenizer.bos_id, *ids]

    def encode_chat(self, messages: Sequence[schema.Message], **options: Any) -> list[int]:
        """The prompt of a conversation; `options` are `ChatTemplate.encode`'s."""
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        plain = [message.model_dump(exclude_none=True) for message in messages]
        return self.template.encode(plain, **options)


async def chat_generation(
    service: Service, http: HttpRequest, body: schema.ChatBody, size: int, name: str
) -> Generation:
    """The generation of a chat, whatever dialect it was asked in. `size`: bytes of the request."""
    service.check_model(body.model)
    params = schema.chat_sampling(body, service.defaults)
    use = tool_use(body)
    info = service.ready_info()
    ids = await chat_prompt(service, body, use, size)
    requests = prepare(
        name,
        ids,
        params,
        info,
        service.eos_ids,
        prompt_param="messages",
        grammar=chat_grammar(body, use, service.controls, ids),
    )
    reading = use.reading(service.controls, ids)
    choices = [
        Choice(i, request, service.tokenizer, reading=reading) for i, request in enumerate(requests)
    ]
    return service.generation(http, "chat", name, body, params, choices, len(ids))


async def chat_prompt(
    service: Service, body: schema.ChatBody, use: ToolUse, size: int
) -> list[int]:
    """The ids that a chat's prompt becomes. `use`: what it says of tools; `size`: bytes of the request."""
    continued = bool(body.continue_final_message)
    generate = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    variables = template_variables(body)
    return await _aside(
        size,
        lambda: service.encode_chat(
            body.messages,
            tools=use.tools,
            variables=variables,
            add_generation_prompt=generate,
            continue_final_message=continued,
        ),
    )


async def render_chat(service: Service, http: HttpRequest) -> Response:
    """The prompt of a chat request, as text and ids; nothing is generated."""
    raw = await read_json(http, service.config.max_body_bytes)
    return await _rendered(service, schema.parse(schema.ChatBody, raw), len(raw))


async def _rendered(service: Service, body: schema.ChatBody, size: int) -> Response:
    service.check_model(body.model)
    ids = await chat_prompt(service, body, tool_use(body), size)
    assert service.template is not None
    return json_response(
        {
            "object": "chat.completion.prompt",
            "model": body.model,
            "prompt": service.tokenizer.decode(ids, skip_special=False),
            "prompt_token_ids": ids,
            "prompt_ends_in": prompt_end(ids, service.controls),
            "template": {"origin": service.template.origin, "sha256": service.template.sha256},
        }
    )


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    raw = await read_json(http, service.config.max_body_bytes)
    body = schema.parse(schema.ChatBody, raw)
    if body.prompt_only:
        return await _rendered(service, body, len(raw))
    name = f"chatcmpl-{uuid.uuid4().hex}"
    generation = await chat_generation(service, http, body, len(raw), name)
    shape = ChatShape(
        name,
        body.model,
        service.tokenizer,
        prompt_logprobs=body.prompt_logprobs is not None,
        include_reasoning=body.include_reasoning is not False,
    )
    return _answer(service, body, generation, shape)


async def completions(service: Service, http: HttpRequest) -> Response:
    raw = await read_json(http, service.config.max_body_bytes)
    body = schema.parse(schema.CompletionBody, raw)
    service.check_model(body.model)
    params = schema.completion_sampling(body, service.defaults)
    info = service.ready_info()
    prompts = await _aside(len(raw), lambda: _prompts(service, body))
    name = f"cmpl-{uuid.uuid4().hex}"
    choices: list[Choice] = []
    for number, (ids, text) in enumerate(prompts):
        choices += _choices(
            service, body, params, info, f"{name}-{number}", ids, text, len(choices)
        )
    prompt_tokens = sum(len(ids) for ids, _ in prompts)
    generation = service.generation(
        http, "text_completion", name, body, params, choices, prompt_tokens
    )
    shape = CompletionShape(
        name,
        body.model,
        service.tokenizer,
        echo_scores=bool(body.echo) and body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    return _answer(service, body, generation, shape)


def _choices(
    service: Service,
    body: schema.CompletionBody,
    params: SamplingParams,
    info: EngineInfo,
    name: str,
    ids: Sequence[int],
    text: str,
    first: int,
) -> list[Choice]:
    requests = prepare(
        name,
        ids,
        params,
        info,
        service.eos_ids,
        refused=service.placeholder_ids,
        grammar=wish_of(body),
    )
    return [
        Choice(
            first + i,
            request,
            service.tokenizer,
            echo=text if body.echo else "",
            silent=body.max_tokens == 0,
        )
        for i, request in enumerate(requests)
    ]


def _prompts(service: Service, body: schema.CompletionBody) -> list[tuple[Sequence[int], str]]:
    """Ids and text of every prompt. Text gets one BOS; ids are used as they are, and decoded only to be echoed."""
    prompt = body.prompt
    if not prompt:
        raise InvalidRequest("prompt is empty: give at least one token", param="prompt")
    many = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    special = body.add_special_tokens is not False
    skip = body.skip_special_tokens is not False
    found: list[tuple[Sequence[int], str]] = []
    for one in many:
        if isinstance(one, str):
            found.append((service.encode_text(one, add_special_tokens=special), one))
        else:
            ids = _ids(one)
            valid = body.echo and all(0 <= i < service.tokenizer.vocab_size for i in ids)
            text = service.tokenizer.decode(ids, skip_special=skip) if valid else ""
            found.append((ids, text))
    return found


def _ids(prompt: Any) -> list[int]:
    assert isinstance(prompt, list)
    return prompt  # pyright: ignore[reportUnknownVariableType]


def _answer(
    service: Service, body: schema.Sampling, generation: Generation, shape: Shape
) -> Response:
    options = body.stream_options or schema.StreamOptions()
    usage = "each" if options.continuous_usage_stats else "last"
    chunks = Chunks(generation, shape, usage if options.include_usage else "none")
    return service.answer(generation, chunks, stream=bool(body.stream))


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Run `work` here, or on a thread when the text is long: the tokenizer lets go of the interpreter."""
    return await asyncio.to_thread(work) if size > SLOW_TEXT else work()
