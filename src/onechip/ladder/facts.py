"""What a server and this machine say of themselves, asked once before a measurement.

Owns the routes where engines tell their name and version. Everything is optional: what nobody says stays None.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onechip.ladder.client import Client, Unreachable
from onechip.ladder.http import Failed
from onechip.ladder.record import Hardware, Model, Software
from onechip.ladder.stream import Json


@dataclass(frozen=True)
class ServerFacts:
    """`tokenize` is the field that /tokenize takes: "prompt" (vLLM, SGLang, onechip), "content" (llama.cpp), None."""

    model: Model
    software: Software
    metrics: bool
    tokenize: str | None


async def ask(client: Client) -> ServerFacts:
    """Everything the server tells. Raises Unreachable when it does not answer at all."""
    model = await client.discover()
    try:
        listed = await client.models()
    except Failed as error:
        raise Unreachable(f"{client.target.url}: {error.message}; start the server first") from None
    entry = next((m for m in listed if m.get("id") == model), {})
    engine, version = await _engine(client, entry)
    length = entry.get("max_model_len") or _dig(entry, "meta", "n_ctx")
    metrics = await _get(client, "/metrics") is not None
    return ServerFacts(
        Model(id=model, max_model_len=length if isinstance(length, int) else None),
        Software(engine=engine, version=version, url=client.target.url),
        metrics,
        await _tokenize_shape(client),
    )


async def _engine(client: Client, entry: Json) -> tuple[str | None, str | None]:
    owner = entry.get("owned_by")
    props = _json(await _get(client, "/props"))
    if "build_info" in props:
        return "llama.cpp", str(props["build_info"])
    version = _json(await _get(client, "/version")).get("version")
    if version is None:
        info = _json(await _get(client, "/get_server_info"))
        version = info.get("version")
    return (str(owner) if owner else None), (str(version) if version else None)


async def _get(client: Client, path: str) -> bytes | None:
    try:
        reply = await client.get(path)
    except Failed:
        return None
    return reply.body if reply.status == 200 else None


def _json(body: bytes | None) -> Json:
    try:
        found: Any = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _dig(found: Any, *path: str) -> Any:
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


async def _tokenize_shape(client: Client) -> str | None:
    for shape in ("prompt", "content"):
        if await count_tokens(client, shape, "one two three"):
            return shape
    return None


async def count_tokens(client: Client, shape: str, text: str) -> int | None:
    """Tokens of `text` as a completion's prompt, BOS and all; None where the server does not say."""
    body: Json = {"model": client.model, "prompt": text}
    if shape == "content":
        body = {"content": text, "add_special": True}
    try:
        reply = await client.post("/tokenize", body)
    except Failed:
        return None
    tokens = _json(reply.body).get("tokens") if reply.status == 200 else None
    return len(tokens) if isinstance(tokens, list) and tokens else None


def this_host(
    accelerator: str | None = None, chips: int = 1, price_per_hour: float | None = None
) -> Hardware:
    """The machine this process runs on; right for the server too when both share it."""
    return Hardware(
        accelerator=accelerator,
        chips=chips,
        price_per_hour=price_per_hour,
        host_cpu=_cpu(),
        host_cores=os.cpu_count(),
        host_memory_gib=_memory_gib(),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
