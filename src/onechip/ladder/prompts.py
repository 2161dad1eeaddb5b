"""The texts that are sent: six fixed chat prompts, and prompts of an exact number of tokens, no two alike.

Owns the wording and the sizing. Filler prompts are common English words, one token each in most vocabularies, drawn
with the seed; they differ from the first word on, so that no prefix cache can serve one from another. A run draws a
seed of its own unless one is given: the same prompts twice would be answered from the cache of the first time.

A length is exact where the server has /tokenize: words, then letters are added until it counts right. Elsewhere it is
calibrated: two requests of one token each show what a word and the wrapping cost, and the record says `calibrated`.
The usage of every timed request is kept either way, so what was really sent is known.
"""

import random
from dataclasses import dataclass
from typing import Any, Literal

from onechip.errors import ConfigError
from onechip.ladder.client import Client
from onechip.ladder.facts import count_tokens
from onechip.ladder.stream import Answer

Endpoint = Literal["completions", "chat"]
Exactness = Literal["exact", "calibrated"]

ONE = {
    "explanation": "Explain to a curious teenager why the sky is blue by day and red at sunset.",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring and "
    "three tests.",
    "listing": "List twenty countries of Africa with their capitals, one per line.",
    "translation": "Translate into French: The old lighthouse keeper climbed the stairs every "
    "evening, lit the lamp, and watched the ships pass until the fog came in. Then translate the "
    "same passage into German and into Spanish.",
    "arithmetic": "A train leaves at 14:10 and arrives at 17:45 after stopping twice for 12 minutes. "
    "It covers 246 km. Work out, step by step, its average speed while moving.",
    "summary": "Summarise in five sentences: The Industrial Revolution began in Britain in the late "
    "eighteenth century. Steam engines replaced water wheels, factories drew people from villages "
    "into towns, and canals and then railways carried coal, iron and cloth. Wages rose slowly, "
    "working days were long, and reformers fought for laws on child labour and for schools. By 1900 "
    "the same changes had spread over Europe, North America and Japan.",
}

WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book eye "
    "job word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea body information back parent face "
    "others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense "
    "nation plan college interest death experience effect use class control field development role "
    "effort rate heart drug show leader light voice wife police mind price report decision son view "
    "relationship town road arm difference value building action model season society tax director "
    "position player record paper space ground form event official matter center couple site project "
    "activity star table need court American oil situation cost industry figure street image phone "
    "data picture practice piece land product doctor wall patient worker news test movie north love "
    "support technology step baby computer type attention film tree source organization hair window "
    "culture chance brother energy period course summer plant opportunity term letter condition choice"
).split()

FILLERS = (
    " a",
    " a",
    ".",
    "!",
    ".",
)  # in some vocabularies a letter is two tokens, and marks may join into one


def words(seed: int, serial: int, count: int) -> list[str]:
    """`count` words, the same for the same seed and serial number."""
    return random.Random(f"{seed}/{serial}").choices(WORDS, k=count)


@dataclass
class Sizer:
    """Makes prompts of a given number of tokens for one server and endpoint; `serial` numbers them."""

    client: Client
    endpoint: Endpoint
    tokenize: str | None
    seed: int = 0
    serial: int = 0
    per_word: float = 1.0
    wrapping: float = 0.0
    calibrated: bool = False

    @property
    def exactness(self) -> Exactness:
        return "exact" if self.tokenize and self.endpoint == "completions" else "calibrated"

    async def make(self, tokens: int, count: int) -> list[str]:
        """`count` prompts of `tokens` tokens each. Raises ConfigError for a length no prompt can have."""
        if self.exactness == "calibrated" and not self.calibrated:
            await self._calibrate()
        return [await self._one(tokens) for _ in range(count)]

    async def _one(self, tokens: int) -> str:
        self.serial += 1
        wanted = round((tokens - self.wrapping) / self.per_word)
        if wanted < 1:
            raise ConfigError(
                f"prompts of {tokens} tokens are too short: the server wraps each in "
                f"{self.wrapping:.0f}; give a longer --shape"
            )
        if self.exactness == "calibrated" or self.tokenize is None:
            return " ".join(words(self.seed, self.serial, wanted))
        return await self._exact(tokens, wanted, self.tokenize)

    async def _exact(self, tokens: int, wanted: int, shape: str) -> str:
        """Words until the next would be too many, then filler; what is nearest below if nothing counts right."""
        pool = words(self.seed, self.serial, wanted)
        best, below, above = "", 0, wanted + 1
        while above - below > 1:
            text = " ".join(pool[:wanted])
            counted = await count_tokens(self.client, shape, text)
            if counted is None or counted == tokens:
                return text
            if counted < tokens:
                best, below = text, wanted
            else:
                above = wanted
            if below == len(pool):
                break
            guess = round(wanted * tokens / counted)
            wanted = min(max(guess, below + 1), above - 1)
        return await self._filled(best or pool[0], tokens, shape)

    async def _filled(self, text: str, tokens: int, shape: str) -> str:
        """Add what is shorter than a word: letters, then marks."""
        for unit in FILLERS:
            counted = await count_tokens(self.client, shape, text) or tokens
            longer = text + unit * max(0, tokens - counted)
            if (await count_tokens(self.client, shape, longer) or tokens) <= tokens:
                text = longer
        return text

    async def _calibrate(self) -> None:
        few, many = 8, 32
        low, high = await self._tokens_of(few), await self._tokens_of(many)
        self.per_word = (high - low) / (many - few)
        self.wrapping = low - few * self.per_word
        self.calibrated = True

    async def _tokens_of(self, count: int) -> int:
        self.serial += 1
        text = " ".join(words(self.seed, self.serial, count))
        answer = await ask(self.client, self.endpoint, text, max_tokens=1, temperature=0)
        if answer.usage is None or answer.usage.prompt_tokens <= 0:
            reason = answer.error.message if answer.error else "it sends no usage"
            raise ConfigError(f"cannot size prompts for this server: {reason}")
        return answer.usage.prompt_tokens


async def ask(client: Client, endpoint: Endpoint, text: str, **fields: Any) -> Answer:
    """One streamed answer to a text, by either route."""
    if endpoint == "chat":
        return await client.chat([{"role": "user", "content": text}], **fields)
    return await client.complete(text, **fields)


async def negotiate(
    client: Client, endpoint: Endpoint, optional: dict[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Which optional fields the server takes, found by asking for one token; and what to say of the others."""
    kept, notes = dict(optional), list[str]()
    first = await ask(client, endpoint, "Hello", max_tokens=1, temperature=0, **kept)
    if first.error is None or first.error.status not in (400, 422):
        return kept, notes
    for name in tuple(optional):
        alone = await ask(
            client, endpoint, "Hello", max_tokens=1, temperature=0, **{name: kept[name]}
        )
        if alone.error is not None and alone.error.status in (400, 422):
            del kept[name]
            notes.append(f"{name} was refused and left out ({alone.error.message})")
    return kept, notes
