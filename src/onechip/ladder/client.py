"""Requests to an OpenAI-compatible server: who is asked, what is sent, and the Answer that comes of it.

`sent` is the moment the request is written, on a connection that was open already. A request that fails is an Answer
too, with `error` set and whatever arrived before it: nothing that went wrong is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from onechip.errors import StartupError
from onechip.ladder.http import Failed, Pool, Reply, parse_address
from onechip.ladder.stream import Answer, Collector, Failure, Json, error_text


class Unreachable(StartupError):
    """The server does not answer, or does not say what it serves."""


@dataclass(frozen=True)
class Target:
    """A server to measure. `model` None takes the first that /v1/models names.

    `timeout` is for a whole request, in seconds; `extra` is merged into every request's body.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout: float = 600.0
    connect_timeout: float = 10.0
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def refusal(reply: Reply) -> Failed:
    """A reply's status from 400 on, with the server's own words."""
    try:
        said: Any = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = reply.body[:300].decode("utf-8", "replace")
    text = error_text(said.get("error") or said) if isinstance(said, dict) else str(said)
    return Failed("status", f"{reply.status}: {text}", reply.status)


class Client:
    """Requests to one server. Use as `async with Client(target) as client`; any number of requests at once."""

    def __init__(self, target: Target):
        self.target = target
        self.address = parse_address(target.url)
        headers = dict(target.headers)
        if target.api_key:
            headers["authorization"] = f"Bearer {target.api_key}"
        self.pool = Pool(self.address, headers, target.connect_timeout)
        self.model = target.model or ""

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.close()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = True, **fields: Any
    ) -> Answer:
        """One chat completion; `fields` go into the body as they are, None leaves one out."""
        return await self.ask("/chat/completions", {"messages": messages, **fields}, stream=stream)

    async def complete(
        self, prompt: str | Sequence[int], *, stream: bool = True, **fields: Any
    ) -> Answer:
        """One completion of a text or of token ids."""
        return await self.ask("/completions", {"prompt": prompt, **fields}, stream=stream)

    async def ask(self, path: str, body: Mapping[str, Any], *, stream: bool = True) -> Answer:
        """POST to an OpenAI route and follow the answer; never raises for what the server does."""
        fields = {"model": self.model, **self.target.extra, **body}
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        encoded = msgspec.json.encode({k: v for k, v in fields.items() if v is not None})
        collector, reply = Collector(), Reply()
        on_piece = collector.piece if stream else None
        error, raw = None, None
        try:
            reply = await self.pool.request(
                "POST",
                self.address.api + path,
                encoded,
                on_piece=on_piece,
                timeout=self.target.timeout,
                reply=reply,
            )
            raw = _conclude(collector, reply, stream)
        except Failed as failed:
            error = Failure(failed.kind, failed.message, failed.status)
        return replace(collector.answer(reply.sent, reply.first), raw=raw, error=error)

    async def get(self, path: str) -> Reply:
        """GET a path of the server's own (not under /v1). Raises Failed when nothing answers."""
        return await self.pool.request("GET", self.address.root + path, timeout=self.target.timeout)

    async def post(self, path: str, body: Any) -> Reply:
        """POST JSON to a path of the server's own. Raises Failed when nothing answers."""
        encoded = msgspec.json.encode(body)
        path = self.address.root + path
        return await self.pool.request("POST", path, encoded, timeout=self.target.timeout)

    async def models(self) -> list[Json]:
        """What /v1/models lists. Raises Failed."""
        reply = await self.get("/v1/models")
        if reply.status >= 400:
            raise refusal(reply)
        try:
            return msgspec.json.decode(reply.body, type=_Models).data
        except msgspec.DecodeError as error:
            raise Failed("malformed", f"/v1/models: {error}") from None

    async def discover(self) -> str:
        """Settle `model`: the one asked for, else the first listed. Raises Unreachable."""
        if self.model:
            return self.model
        try:
            listed = await self.models()
        except Failed as error:
            raise Unreachable(
                f"{self.target.url} does not say what it serves ({error.message}); "
                "start the server, or name the model with --model"
            ) from None
        if not listed or not listed[0].get("id"):
            raise Unreachable(f"{self.target.url} lists no model; name one with --model")
        self.model = str(listed[0]["id"])
        return self.model


class _Models(msgspec.Struct):
    data: list[Json] = []


def _conclude(collector: Collector, reply: Reply, stream: bool) -> Json | None:
    """Check that an answer is whole; of one that was not streamed, take its parts. Returns its JSON. Raises Failed."""
    if reply.status >= 400:
        raise refusal(reply)
    raw: Json | None = None
    if not stream:
        collector.whole(reply.body, reply.end)
        raw = msgspec.json.decode(reply.body)
    elif collector.rest.strip():
        collector.piece(b"\n\n", reply.end)
    if collector.finish is None:
        raise Failed("broken", "the answer ended without a finish reason")
    return raw
