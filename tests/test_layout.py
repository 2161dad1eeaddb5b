"""The house rules that no linter checks: sizes, docstrings, package files, and where the environment is read."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "onechip"
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTION))


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_kernel(path: Path) -> bool:
    return "kernels" in path.parts


@pytest.fixture(params=MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def module(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_a_module_opens_with_a_docstring(module: Path):
    assert ast.get_docstring(ast.parse(module.read_text()))


def test_a_module_is_short(module: Path):
    assert len(module.read_text().splitlines()) < (600 if is_kernel(module) else 400)


def test_a_function_is_short(module: Path):
    limit = 120 if is_kernel(module) else 60
    assert [f"{f.name}: {lines(f)}" for f in functions(module) if lines(f) > limit] == []


def test_the_median_function_is_under_ten_lines():
    assert statistics.median(lines(f) for path in MODULES for f in functions(path)) < 10


def test_a_package_file_holds_its_docstring_only():
    """`chat` names `parse`, its one public function, on first use; so it too imports nothing of ours by itself."""
    for path in SOURCE.glob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 or path.parent.name == "chat", path
        for imported in (node for node in body if isinstance(node, ast.ImportFrom)):
            assert imported.module == "typing", path


def test_the_environment_is_read_in_the_command_line_only(module: Path):
    names = {
        node.attr
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert module.name == "cli.py" or not names & {"environ", "getenv"}
