"""GSM8K: the prompt, and how an answer is read and judged. Pure text; asks nobody and reads no file.

The published rule: the model is told to solve step by step and to end with `Answer: <number>`; the answer is the last
number after `Answer:`, else the last number in the text. Where that sentence leaves room:

- Of several `Answer:` the last one counts, so a model may correct itself; case, bold marks and a wide colon do not
  matter.
- "After" is the first line from there on that holds a number, so a remark below the answer is not taken for it. A
  marker with no number behind it (a cut text) falls back to the whole text.
- A number may carry a sign (the typesetters' minus too), thousands separators, decimals, a power of ten, or be a
  fraction, plain, mixed or in LaTeX. A minus after a digit is a range or a subtraction. Units, currency, per cent
  signs and exponents of units are ignored: 50% is 50, and 12 m^2 is 12.
- Numbers are compared exactly: 1,319.00 is 1319. A run of over 300 digits is a model gone astray, not a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from onechip.errors import ConfigError

INSTRUCTION = (
    "Solve the following problem step by step. "
    "Then give the final answer alone on the last line as `Answer: <number>`."
)
MAX_TOKENS = 2048

_MARKER = re.compile(r"answer[\s*_`]*[:：]", re.IGNORECASE)
_TYPESET = str.maketrans({"−": "-", "‒": "-", "–": "-", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"})
_LATEX_FRACTION = re.compile(r"(\d?)\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_POWER_OF_TEN = re.compile(r"(?<=\d)\s*(?:×|\\times|[x*])\s*10\s*\^\s*\{?([-+]?\d{1,3})\}?")
_GROUP = r"(?:,|\\,|\{,\}|[\u00a0\u2009\u202f'_])"
_NUMBER = re.compile(
    rf"""(?P<sign>(?:(?<![\w.)%])-(?=\\?\$?[\d.])|(?<=[:：=]\s)-\s)(?:\\?\$\s?)?)?
    (?<![\d^])(?<!\^\{{)(?<!\^-)
    (?P<whole>(?:\d{{1,3}}(?:{_GROUP}\d{{3}}){{1,99}}|\d{{1,300}})?(?:\.\d{{1,300}})?)(?<=\d)(?!\d)
    (?:e(?P<power>[-+]?\d{{1,3}})(?!\w))?
    (?:\s?/\s?(?P<under>\d{{1,300}})(?!\d)|\s(?P<part>\d{{1,300}})/(?P<of>\d{{1,300}})(?!\d))?""",
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class Question:
    """`id` is the position in the published test split, `gold` the number after its `####`."""

    id: str
    text: str
    gold: Fraction


def question(index: int, row: Mapping[str, object]) -> Question:
    """A line of the published file: {"question": ..., "answer": "... #### 18"}."""
    text, answer = row.get("question"), row.get("answer")
    if not isinstance(text, str) or not isinstance(answer, str) or "####" not in answer:
        raise ConfigError(
            f"line {index + 1} is not a GSM8K question: it needs the strings 'question' and 'answer', "
            "and a number after '####' in the latter"
        )
    gold = last_number(answer.rpartition("####")[2])
    if gold is None:
        raise ConfigError(f"line {index + 1} has no number after '####': {answer[-40:]!r}")
    return Question(str(index), text, gold)


def prompt(question: Question) -> str:
    return f"{INSTRUCTION}\n\n{question.text}"


def extract(text: str) -> Fraction | None:
    """The number a model's answer means, or None where the text holds no number at all."""
    marks = list(_MARKER.finditer(text))
    if marks:
        for line in text[marks[-1].end() - 1 :].splitlines():
            found = last_number(line)
            if found is not None:
                return found
    return last_number(text)


def last_number(text: str) -> Fraction | None:
    found: Fraction | None = None
    for match in _NUMBER.finditer(_plain(text)):
        found = _value(match)
    return found


def shown(number: Fraction | None) -> str | None:
    """As a record keeps it: exact, and short for a whole number."""
    return None if number is None else str(number)


def _plain(text: str) -> str:
    text = _LATEX_FRACTION.sub(
        lambda m: f"{m[1]}{' ' if m[1] else ''}{m[2].strip()}/{m[3].strip()}", text
    )
    return _POWER_OF_TEN.sub(r"e\1", text.translate(_TYPESET))


def _value(match: re.Match[str]) -> Fraction:
    value = Fraction(re.sub(r"[^\d.]", "", match["whole"]))
    value *= Fraction(10) ** int(match["power"] or 0)
    if match["under"] and int(match["under"]):
        value /= int(match["under"])
    if match["part"] and int(match["of"]):
        value += Fraction(int(match["part"]), int(match["of"]))
    return -value if match["sign"] else value
