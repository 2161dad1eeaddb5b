"""Where the questions come from. Nothing is vendored: a file, an installed package, or a download the user sees.

- GSM8K (MIT): `--data FILE.jsonl`, the published test split, or the hub's rows of `openai/gsm8k`. The hub keeps Parquet
  files; its row service gives the same rows as JSON, which needs no Parquet reader. They are kept in the cache.
- BFCL (Apache-2.0): `--data DIR` with the question file and `possible_answer/`, an installed `bfcl-eval`, or its wheel,
  which pip downloads into the cache without its dependencies and which is read as it is, after its hash was checked.

A digest of the questions goes into the record, so that two runs can be told to have asked the same.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from onechip.errors import StartupError
from onechip.ladder import bfcl, gsm8k

GSM8K_ROWS = (
    "https://datasets-server.huggingface.co/rows?dataset=openai%2Fgsm8k&config=main&split=test"
)
GSM8K_COUNT = 1319
PAGE = 100  # the most rows the service gives at a time
BFCL_WHEEL = "bfcl_eval-2026.3.23-py3-none-any.whl"
BFCL_PACKAGE = "bfcl-eval==2026.3.23"
BFCL_SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
# The same 400 questions under the names of versions 4 and 3.
BFCL_FILES = ("BFCL_v4_simple_python.json", "BFCL_v3_simple.json")

Say = Callable[[str], None]


class NoData(StartupError):
    """The questions of an eval are not here and could not be fetched."""


def load_gsm8k(
    path: Path | None, cache: Path, say: Say, rows_url: str = GSM8K_ROWS
) -> tuple[list[gsm8k.Question], str]:
    """The questions in their published order, and their digest."""
    if path is None:
        path = cache / "gsm8k_test.jsonl"
        if not path.exists():
            say("fetching GSM8K (openai/gsm8k, MIT licence) from the Hugging Face hub")
            _fetch_gsm8k(path, rows_url)
    lines = [line for line in _text(path).splitlines() if line.strip()]
    questions = [gsm8k.question(index, _row(path, index, line)) for index, line in enumerate(lines)]
    if not questions:
        raise NoData(f"{path} holds no question; give the published test.jsonl with --data")
    return questions, _digest(f"{each.text}\n{each.gold}" for each in questions)


def _row(path: Path, index: int, line: str) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise NoData(f"{path} line {index + 1} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise NoData(f"{path} line {index + 1} is not an object")
    return row


def _fetch_gsm8k(path: Path, url: str) -> None:
    rows: list[dict[str, str]] = []
    try:
        while len(rows) < GSM8K_COUNT:
            page = f"{url}&offset={len(rows)}&length={PAGE}"
            with urllib.request.urlopen(page, timeout=60) as answer:
                found = [each["row"] for each in json.load(answer)["rows"]]
            if not found:
                raise ValueError(f"only {len(rows)} of {GSM8K_COUNT} rows came")
            rows += found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoData(
            f"GSM8K could not be fetched from the hub ({error}). Download test.jsonl of "
            "github.com/openai/grade-school-math (MIT) elsewhere and give it with --data FILE.jsonl"
        ) from error
    _keep(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _keep(path: Path, data: bytes) -> None:
    """Write in one step, so that a broken run leaves no half file to be read next time."""
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise NoData(f"cannot write {path}: {error}; make room, or give --data") from error


def load_bfcl(path: Path | None, cache: Path, say: Say) -> tuple[list[bfcl.Question], str]:
    """BFCL simple, 400 questions, and their digest."""
    read = _reader(path) if path is not None else _installed() or _wheel(cache, say)
    for name in BFCL_FILES:
        asked, answers = read(name), read(f"possible_answer/{name}")
        if asked is not None and answers is not None:
            found = bfcl.questions(asked.splitlines(), answers.splitlines())
            return found, _digest([asked, answers])
    raise NoData(
        f"{path or 'bfcl-eval'} has none of {', '.join(BFCL_FILES)} with possible_answer/; --data takes "
        "the folder bfcl_eval/data of the package bfcl-eval"
    )


Reader = Callable[[str], str | None]


def _reader(folder: Path) -> Reader:
    def read(name: str) -> str | None:
        return _text(folder / name) if (folder / name).exists() else None

    return read


def _installed() -> Reader | None:
    """An installed bfcl-eval is found without importing it: it would drag in its dependencies."""
    spec = importlib.util.find_spec("bfcl_eval")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return _reader(Path(places[0]) / "data") if places else None


def _wheel(cache: Path, say: Say) -> Reader:
    wheel = cache / BFCL_WHEEL
    if not wheel.exists():
        say(f"fetching the package {BFCL_PACKAGE} (BFCL's questions, Apache-2.0) into {cache}")
        _download_bfcl(cache)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != BFCL_SHA256:
        raise NoData(f"{wheel} has sha256 {found}, not {BFCL_SHA256}; remove it and try again")
    return _zip_reader(wheel)


def _zip_reader(wheel: Path) -> Reader:
    archive = zipfile.ZipFile(wheel)

    def read(name: str) -> str | None:
        member = f"bfcl_eval/data/{name}"
        return archive.read(member).decode() if member in archive.namelist() else None

    return read


def _download_bfcl(cache: Path) -> None:
    words = ("pip", "download", "--quiet", "--no-deps", BFCL_PACKAGE, "--dest", str(cache))
    done = subprocess.run(
        (sys.executable, "-m", *words), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoData(
            f"BFCL could not be fetched ({done.stderr.strip()[-200:]}). Run `{' '.join(words)}` where there is "
            "a network, or unpack the wheel and give its bfcl_eval/data with --data DIR"
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoData(f"cannot read {path}: {error}") from error


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
