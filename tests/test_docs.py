"""The documentation is true: the API page is that of the code, and every test named for a bug case exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = (
    "A01 A02 A03 A05 A07 A08 A10 A11 A13 A14 A16 A17 A19 A20 A22 B01 B02 B04 B05 B07 B08 B10 "
    "C01 C02 C04 C05 C07 C08 C10 C11 C13 C14 C16 D01 D02 D04 D05 D07 D08 D10 D11 "
    "E02 E04 E05 E07 E08 E10 E11 E13 E14 F01 F02 F04 F05 F07 F08 G01 G02 G03 G04 G05 G07 G08 G10 G11"
).split()
ROW = re.compile(r"^\| ([A-G]\d\d) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text())
    names = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


def bug_cases() -> dict[str, str]:
    return dict(ROW.findall((ROOT / "docs" / "bug_cases.md").read_text()))


def test_every_bug_case_is_in_the_table():
    assert list(bug_cases()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_bug_case_names_tests_that_exist_or_a_reason(case: str):
    text = bug_cases()[case]
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", text)
    assert named or text.startswith("not applicable: ")
    for file, name in named:
        assert name in names_in(file), f"{file}::{name}"
