"""Questions come from a file, a package or a download, and what is missing says how to get it."""

import hashlib
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from onechip.errors import ConfigError
from onechip.ladder import datasets
from onechip.ladder.datasets import NoData

ROWS = [{"question": f"What is {i}?", "answer": f"It is.\n#### {i},000"} for i in range(250)]
FUNCTION = {"name": "f", "parameters": {"type": "dict", "properties": {}, "required": []}}
ASKED = json.dumps(
    {"id": "a", "question": [[{"role": "user", "content": "?"}]], "function": [FUNCTION]}
)
ANSWER = json.dumps({"id": "a", "ground_truth": [{"f": {}}]})


def silent(_: str) -> None:
    pass


@contextmanager
def rows_service(rows: list[Any]) -> Iterator[str]:
    """The hub's row service: pages of at most 100."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            offset, length = int(query["offset"][0]), min(int(query["length"][0]), 100)
            page = [{"row_idx": i, "row": row} for i, row in enumerate(rows)][
                offset : offset + length
            ]
            body = json.dumps({"rows": page, "num_rows_total": len(rows)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/rows?split=test"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_gsm8k_from_a_file(tmp_path: Path):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    questions, digest = datasets.load_gsm8k(path, tmp_path, silent)
    assert [q.id for q in questions] == [str(i) for i in range(250)]
    assert questions[7].gold == 7000
    assert len(digest) == 64
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    assert datasets.load_gsm8k(path, tmp_path, silent)[1] != digest


def test_gsm8k_from_the_hub_is_fetched_once_and_equals_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets, "GSM8K_COUNT", len(ROWS))
    said: list[str] = []
    with rows_service(ROWS) as url:
        questions, digest = datasets.load_gsm8k(None, tmp_path, said.append, url)
    again = datasets.load_gsm8k(None, tmp_path, said.append, "http://127.0.0.1:1/gone?")
    assert again == (questions, digest)
    assert len(questions) == 250
    assert len(said) == 1
    assert "MIT" in said[0]


@pytest.mark.parametrize("rows", [ROWS[:120], [], ["no row"]])
def test_half_a_download_is_not_kept(
    tmp_path: Path, rows: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets, "GSM8K_COUNT", len(ROWS))
    with rows_service(rows) as url, pytest.raises((NoData, ConfigError)):
        datasets.load_gsm8k(None, tmp_path, silent, url)


def test_without_a_network_the_remedy_is_named(tmp_path: Path):
    with pytest.raises(NoData, match=r"grade-school-math \(MIT\).*--data FILE.jsonl"):
        datasets.load_gsm8k(None, tmp_path, silent, "http://127.0.0.1:1/rows?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no question"),
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 is not an object"),
        ("{}", "line 1 is not a GSM8K"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises((NoData, ConfigError), match=complaint):
        datasets.load_gsm8k(path, tmp_path, silent)
    with pytest.raises(NoData, match="cannot read"):
        datasets.load_gsm8k(tmp_path / "none.jsonl", tmp_path, silent)


@pytest.mark.parametrize("name", datasets.BFCL_FILES)
def test_bfcl_from_a_folder_under_the_names_of_either_version(tmp_path: Path, name: str):
    (tmp_path / "possible_answer").mkdir()
    (tmp_path / name).write_text(ASKED)
    (tmp_path / "possible_answer" / name).write_text(ANSWER)
    questions, digest = datasets.load_bfcl(tmp_path, tmp_path, silent)
    assert [q.id for q in questions] == ["a"]
    assert len(digest) == 64


def test_bfcl_from_a_folder_that_has_none(tmp_path: Path):
    with pytest.raises(NoData, match=r"BFCL_v4_simple_python.json.*bfcl_eval/data"):
        datasets.load_bfcl(tmp_path, tmp_path, silent)


def wheel(cache: Path) -> Path:
    path = cache / datasets.BFCL_WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"bfcl_eval/data/{datasets.BFCL_FILES[0]}", ASKED)
        archive.writestr(f"bfcl_eval/data/possible_answer/{datasets.BFCL_FILES[0]}", ANSWER)
    return path


def test_bfcl_from_the_cached_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = hashlib.sha256(wheel(tmp_path).read_bytes()).hexdigest()
    monkeypatch.setattr(datasets, "BFCL_SHA256", found)
    assert [q.id for q in datasets.load_bfcl(None, tmp_path, silent)[0]] == ["a"]


def test_a_wheel_of_another_content_is_refused(tmp_path: Path):
    wheel(tmp_path)
    with pytest.raises(NoData, match="remove it"):
        datasets.load_bfcl(None, tmp_path, silent)


def test_an_installed_package_is_read_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = tmp_path / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True)
    (tmp_path / "bfcl_eval" / "__init__.py").write_text(
        "raise ImportError('dependencies are missing')"
    )
    (data / datasets.BFCL_FILES[0]).write_text(ASKED)
    (data / "possible_answer" / datasets.BFCL_FILES[0]).write_text(ANSWER)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [q.id for q in datasets.load_bfcl(None, tmp_path / "no cache", silent)[0]] == ["a"]


def test_a_failed_download_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.sys, "executable", "/bin/false")
    said: list[str] = []
    with pytest.raises(NoData, match=r"pip download .*--no-deps bfcl-eval.*--data DIR"):
        datasets.load_bfcl(None, tmp_path, said.append)
    assert "Apache-2.0" in said[0]
