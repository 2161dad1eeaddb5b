"""GSM8K answers as models really write them, and the number each means."""

from fractions import Fraction

import pytest

from onechip.errors import ConfigError
from onechip.ladder import gsm8k

WRITTEN = [
    ("Answer: 18", "18"),
    ("Answer: 1,319.00", "1319"),
    ("Answer: 5 apples", "5"),
    ("Answer: -3", "-3"),
    ("Answer: −10", "-10"),  # U+2212
    ("Answer: - 10", "-10"),
    ("Answer: -$10", "-10"),
    ("Answer: $-10", "-10"),
    (r"Answer: \$1,450,000", "1450000"),
    ("Answer: $1,319.", "1319"),
    ("Answer: 50%", "50"),
    ("Answer: .5", "1/2"),
    ("Answer: 0.5 hours", "1/2"),
    ("Answer: 3/4", "3/4"),
    ("Answer: 2 1/2", "5/2"),
    ("Answer: 2½ cups", "5/2"),
    (r"Answer: $\frac{1}{2}$", "1/2"),
    (r"Answer: $-\frac{1}{2}$", "-1/2"),
    (r"Answer: 2\dfrac{1}{2}", "5/2"),
    (r"Answer: \boxed{42}", "42"),
    (r"Answer: $\boxed{1,319}$", "1319"),
    (r"Answer: 1{,}319", "1319"),
    ("Answer: 1\u202f319", "1319"),
    ("Answer: **42**", "42"),
    ("**Answer:** 42", "42"),
    ("**Answer**: 42", "42"),
    ("FINAL ANSWER：42", "42"),
    ("Answer:\n\n42", "42"),
    ("Answer: 42\n\nThis took 3 steps.", "42"),
    ("Answer: 3 + 4 = 7", "7"),
    ("Answer: 10-12", "12"),
    ("Answer: 10–12", "12"),
    ("Answer: 12 m^2", "12"),
    ("Answer: 12 m²", "12"),
    ("Answer: 12 m^{2}", "12"),
    ("Answer: 1.5e3", "1500"),
    (r"Answer: 1.5 \times 10^3", "1500"),
    ("Answer: 7\nWait, that is wrong.\nAnswer: 8", "8"),
    ("Answer: 7\nLet me check. Answer: unknown", "7"),
    ("First 5 and then 6 make 11.", "11"),
    ("She pays 5 - 3 = 2 dollars", "2"),
    ("She pays x = -5", "-5"),
    ("The total is 1,319.00.", "1319"),
    ("12,34", "34"),
    ("7.5.", "15/2"),
    ("7/0", "7"),
    ("", None),
    ("No idea.", None),
    ("Answer: none", None),
    ("Answer: $", None),
    ("3 and then " + "9" * 9000, "3"),
    ("1/" + "9" * 9000, "1"),
]


@pytest.mark.parametrize(("text", "meant"), WRITTEN, ids=[repr(text[:40]) for text, _ in WRITTEN])
def test_an_answer_is_read_as_a_reader_would(text: str, meant: str | None):
    assert gsm8k.extract(text) == (None if meant is None else Fraction(meant))


def test_what_is_shown_reads_back_as_the_same_number():
    for _, meant in WRITTEN:
        if meant is not None:
            assert gsm8k.last_number(gsm8k.shown(Fraction(meant)) or "") == Fraction(meant)


@pytest.mark.parametrize(
    ("gold", "value"), [("#### 2,125", 2125), ("9-16 #### -10", -10), ("#### 18", 18)]
)
def test_the_gold_number_follows_the_hashes(gold: str, value: int):
    assert gsm8k.question(0, {"question": "?", "answer": gold}).gold == value


@pytest.mark.parametrize(
    "row", [{}, {"question": "?", "answer": "18"}, {"question": "?", "answer": "#### ?"}]
)
def test_a_line_that_is_no_question_is_named(row: dict[str, object]):
    with pytest.raises(ConfigError, match="line 8"):
        gsm8k.question(7, row)


def test_the_prompt_holds_the_instruction_and_the_question():
    asked = gsm8k.prompt(gsm8k.Question("0", "How many?", Fraction(1)))
    assert asked.startswith(gsm8k.INSTRUCTION)
    assert "`Answer: <number>`" in asked
    assert asked.endswith("How many?")
