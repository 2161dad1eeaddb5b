"""Probes of plain text: the split of reasoning, greedy identity, recall over long contexts, and pictures."""

import asyncio
import base64
import random
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from onechip.ladder.client import Client
from onechip.ladder.probes import (
    Check,
    Finding,
    Probe,
    contains,
    first_wrong,
    judged,
    no_markers,
    not_cut,
    once,
    refusal_or_error,
)
from onechip.ladder.prompts import negotiate
from onechip.ladder.stream import Answer

LONG_RUN = 512  # tokens of the greedy identity probes
REPEATS = 4
RECALL_SIZES = (2048, 8192, 14336, 32768, 65536, 131072)  # the published depths, then doubling
RECALL_ROOM = 256  # tokens left for the question, the template and the answer
NEEDLES = (0.1, 0.5, 0.9)  # where in the context a number is hidden
CALIBRATION = (4, 20)  # sentences sent to learn, from the difference, how many tokens one has
SIDE = 224

PLACES = "harbour market library garden station museum bakery chapel orchard workshop theatre mill".split()
THINGS = "lantern ladder kettle basket mirror trumpet blanket compass barrel candle saddle anchor".split()
TEXTURES = (
    "copper velvet wooden marble woollen silver paper leather glass iron wicker stone".split()
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def probes() -> list[Probe]:
    sum_ = [user("What is 17 times 23? Give the number.")]
    return [
        once("reasoning", "split from the answer, thinking on", sum_, _thought, max_tokens=2048,
             chat_template_kwargs={"enable_thinking": True}),
        once("reasoning", "none with thinking off", sum_, _plain, max_tokens=256,
             chat_template_kwargs={"enable_thinking": False}),
        Probe("greedy", f"same text one after the other, {LONG_RUN} tokens", _repeated),
        Probe("greedy", f"same text {REPEATS} at once, {LONG_RUN} tokens", _at_once),
        *(Probe("context", f"recall in {size} tokens", _recall_of(size)) for size in RECALL_SIZES),
        once("pictures", "colour of one", [user([_picture(220, 20, 20), _question("What colour is it? One word.")])],
             contains("red"), max_tokens=256),
        once("pictures", "two in order",
             [user([_picture(20, 20, 220), _picture(20, 160, 20),
                    _question("Which colours have the first and the second picture? Two words, in order.")])],
             _in_order("blue", "green"), max_tokens=256),
    ]  # fmt: skip


def _thought(answer: Answer) -> str | None:
    return first_wrong(
        not_cut(answer),
        None if answer.reasoning.strip() else "no reasoning came apart from the content",
        no_markers(answer),
        contains("391")(answer),
    )


def _plain(answer: Answer) -> str | None:
    return first_wrong(
        "reasoning came although thinking is off" if answer.reasoning.strip() else None,
        no_markers(answer),
        contains("391")(answer),
    )


async def _long(client: Client, fields: Mapping[str, Any]) -> Answer:
    story = [user("Write a long story about a lighthouse keeper who finds a letter.")]
    return await client.chat(story, temperature=0, max_tokens=LONG_RUN, **fields)


async def _no_end(client: Client) -> Mapping[str, Any]:
    """`ignore_eos` where the server takes it; elsewhere the story ends where it ends."""
    return (await negotiate(client, "chat", {"ignore_eos": True}))[0]


async def _repeated(client: Client, max_model_len: int | None) -> Finding:
    fields = await _no_end(client)
    return identical([await _long(client, fields) for _ in range(REPEATS)])


async def _at_once(client: Client, max_model_len: int | None) -> Finding:
    fields = await _no_end(client)
    alone = await _long(client, fields)
    together = await asyncio.gather(*(_long(client, fields) for _ in range(REPEATS)))
    return identical([alone, *together])


def identical(answers: list[Answer]) -> Finding:
    """Pass where all texts are one; else how far they agree."""
    for answer in answers:
        if answer.error is not None:
            return Finding(refusal_or_error(answer), answer.error.message, answer)
    texts = [answer.reasoning + answer.text for answer in answers]
    if not texts[0]:
        return Finding("fail", "the text is empty", answers[0])
    others = sum(text != texts[0] for text in texts)
    if others:
        agree = _agreement(texts)
        detail = f"{others} of {len(texts) - 1} repeats differ; all agree for {agree} of {len(texts[0])} characters"
        return Finding("fail", detail, answers[0])
    return Finding("pass", f"{len(texts)} equal texts of {len(texts[0])} characters", answers[0])


def _agreement(texts: list[str]) -> int:
    """Characters from the start that all texts share."""
    columns = enumerate(zip(*texts, strict=False))
    return next((i for i, column in columns if len(set(column)) > 1), min(map(len, texts)))


def _recall_of(size: int) -> Any:
    async def run(client: Client, max_model_len: int | None) -> Finding:
        return await _recall(client, size, max_model_len)

    return run


async def _recall(client: Client, size: int, max_model_len: int | None) -> Finding:
    """Hide numbers at several depths of about `size` tokens of distinct sentences, and ask for all of them."""
    if max_model_len is not None and size > max_model_len:
        return Finding("unsupported", f"the server takes {max_model_len} tokens")
    sizes: list[int] = []
    for number in CALIBRATION:
        text = " ".join(sentences(number, 0))
        sample = await client.chat([user(text)], temperature=0, max_tokens=1)
        if sample.error is not None:
            return Finding(refusal_or_error(sample), sample.error.message, sample)
        if sample.usage is None:
            return Finding("error", "no usage is reported, so no context can be sized", sample)
        sizes.append(sample.usage.prompt_tokens)
    each = max(1, sizes[1] - sizes[0]) / (CALIBRATION[1] - CALIBRATION[0])
    count = int((size - RECALL_ROOM) / each)
    text, codes = haystack(count, size)
    names = ", ".join(codes)
    asked = f"{text}\n\nWhich numbers belong to {names}? List each number."
    answer = await client.chat([user(asked)], temperature=0, max_tokens=128)
    found = judged(answer, contains(*codes.values()))
    given = answer.usage.prompt_tokens if answer.usage else "unknown"
    return Finding(found.verdict, f"{given} prompt tokens; {found.detail}", answer)


def sentences(count: int, seed: int) -> list[str]:
    """Distinct sentences of much the same number of tokens (hence the zeros before the number)."""
    draw = random.Random(seed).choice
    return [
        f"Near the {draw(PLACES)} somebody left a {draw(TEXTURES)} {draw(THINGS)} on day {number:05}."
        for number in range(1, count + 1)
    ]


def haystack(count: int, seed: int) -> tuple[str, dict[str, str]]:
    """(text, code name to number): `count` sentences with a number hidden at each depth."""
    lines = sentences(count, seed)
    rng = random.Random(seed + 1)
    codes = {
        name: str(rng.randrange(100_000, 1_000_000)) for name in ("Heron", "Juniper", "Quartz")
    }
    # From the back, so that an insertion does not move the places before it.
    for depth, (name, number) in sorted(zip(NEEDLES, codes.items(), strict=True), reverse=True):
        lines.insert(int(depth * count), f"The number of {name} is {number}.")
    return " ".join(lines), codes


def _in_order(first: str, second: str) -> Check:
    def check(answer: Answer) -> str | None:
        text = answer.text.lower()
        good = -1 < text.find(first) < text.find(second)
        return None if good else f"{first}, then {second} was wanted"

    return check


def _question(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _picture(red: int, green: int, blue: int) -> dict[str, Any]:
    data = base64.b64encode(png(red, green, blue)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def png(red: int, green: int, blue: int) -> bytes:
    """A square of one colour as PNG."""
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, green, blue)) * SIDE) * SIDE
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
