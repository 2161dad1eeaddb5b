"""The evals as tasks: what is asked of the server, and how an answer on record is scored.

Owns the join of a benchmark's rules (`gsm8k`, `bfcl`) with requests and record items; asks nobody.

Scoring is a function of the `Item` alone - its text, calls and `expected` - so that a record can be scored again years
later without server and data. What each benchmark needs for that is kept in `expected`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from msgspec.structs import replace

from onechip.errors import ConfigError
from onechip.ladder import bfcl, gsm8k
from onechip.ladder.prompts import Endpoint
from onechip.ladder.record import Item

Thinking = Literal["on", "off", "unset"]
Score = Callable[[Item], Item]


@dataclass(frozen=True)
class Question:
    """One request: `messages` for chat, `prompt` for plain completion; `expected` goes into the record."""

    id: str
    messages: tuple[Mapping[str, Any], ...]
    prompt: str | None
    fields: Mapping[str, Any]
    expected: Any


@dataclass(frozen=True)
class Task:
    """`settings` must be equal for two runs to be comparable; `gate` questions are asked before the rest."""

    name: str
    questions: Sequence[Question]
    max_tokens: int
    settings: Mapping[str, Any]
    gate: int = 50


def gsm8k_task(
    questions: Sequence[gsm8k.Question],
    digest: str,
    *,
    endpoint: Endpoint = "chat",
    thinking: Thinking = "off",
    max_tokens: int = gsm8k.MAX_TOKENS,
) -> Task:
    """GSM8K as published: greedy, one user message, the answer on the last line."""
    return Task(
        "gsm8k",
        [
            Question(
                each.id,
                ({"role": "user", "content": gsm8k.prompt(each)},),
                gsm8k.prompt(each) + "\n\n" if endpoint == "completions" else None,
                _fields(endpoint, thinking),
                gsm8k.shown(each.gold),
            )
            for each in questions
        ],
        max_tokens,
        _settings(digest, max_tokens, endpoint, thinking) | {"instruction": gsm8k.INSTRUCTION},
    )


def bfcl_task(
    questions: Sequence[bfcl.Question],
    digest: str,
    *,
    thinking: Thinking = "off",
    max_tokens: int = bfcl.MAX_TOKENS,
) -> Task:
    """BFCL simple as published: OpenAI tools, the model decides whether to call."""
    return Task(
        "bfcl",
        [
            Question(
                each.id,
                each.messages,
                None,
                {**_fields("chat", thinking), "tools": bfcl.tools(each), "tool_choice": "auto"},
                {"functions": each.functions, "truth": each.truth},
            )
            for each in questions
        ],
        max_tokens,
        _settings(digest, max_tokens, "chat", thinking) | {"tool_choice": "auto"},
    )


def _fields(endpoint: Endpoint, thinking: Thinking) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": 0}
    if endpoint == "chat" and thinking != "unset":
        fields["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
    return fields


def _settings(digest: str, max_tokens: int, endpoint: str, thinking: str) -> dict[str, Any]:
    return {
        "data_sha256": digest,
        "max_tokens": max_tokens,
        "temperature": 0,
        "endpoint": endpoint,
        "thinking": thinking,
    }


def score_gsm8k(item: Item) -> Item:
    number = gsm8k.extract(item.text)
    right = number is not None and number == Fraction(item.expected)
    verdict = "no_answer" if number is None else "right" if right else "wrong_value"
    return replace(item, right=right, verdict=verdict, got=gsm8k.shown(number))


def score_bfcl(item: Item) -> Item:
    expected = item.expected
    question = bfcl.Question(item.id, (), tuple(expected["functions"]), tuple(expected["truth"]))
    calls = [(call["name"], call["arguments"]) for call in item.tool_calls]
    judged = bfcl.judge(question, calls)
    return replace(item, right=judged.right, verdict=judged.verdict, got=judged.why or None)


SCORES: Mapping[str, Score] = {"gsm8k": score_gsm8k, "bfcl": score_bfcl}


def score(item: Item) -> Item:
    """The verdict on an answer; a request that failed is an error and not right. Raises ConfigError."""
    if item.error is not None:
        return replace(item, right=False, verdict="error", got=None)
    if item.task not in SCORES:
        raise ConfigError(
            f"no task {item.task!r} is known; this version scores {', '.join(SCORES)}"
        )
    try:
        return SCORES[item.task](item)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"answer {item.id} of {item.task} cannot be scored: {error!r}") from error
