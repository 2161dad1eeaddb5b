"""`serve` as a process: what it prints, when it is ready, and the status it ends with."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.server.harness import error, ok, until
from tests.tiny_tokenizer import document

from onechip.server.main import listen

TESTS = Path(__file__).parent.parent
SCRIPT = """
import sys
from onechip.config import EngineConfig, ServerConfig
from onechip.errors import StartupError
from onechip.server.main import serve
model, port, fake, log_format = sys.argv[1:]
config = ServerConfig(port=int(port), log_format=log_format)
try:
    status = serve(model, EngineConfig(random_weights=True), config, (sys.executable, fake))
except StartupError as error:
    print("refused:", error.message, file=sys.stderr)
    status = 2
sys.exit(status)
"""


@dataclass
class Serving:
    process: subprocess.Popen[str]
    http: httpx.Client
    errors: Path

    def children(self) -> list[int]:
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(pid) for pid in found.stdout.split()]


def checkpoint(directory: Path, *, tokenizer: bool = True) -> Path:
    """A config and a small tokenizer (without turn pieces, whose ids a Gemma fixes), but no weights."""
    directory.mkdir()
    shutil.copy(TESTS / "data" / "golden" / "gemma3-mini" / "config.json", directory)
    if tokenizer:
        text = json.dumps(document("gemma3"))
        for name in ("start_of_turn", "end_of_turn", "start_of_image"):
            text = text.replace(f"<{name}>", f"<{name}_>")
        (directory / "tokenizer.json").write_text(text)
    return directory


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextmanager
def serving(
    model: Path | str, tmp_path: Path, port: int | None = None, log_format: str = "text"
) -> Iterator[Serving]:
    port = port or free_port()
    errors = tmp_path / "stderr"
    argv = [
        sys.executable,
        "-c",
        SCRIPT,
        str(model),
        str(port),
        str(TESTS / "fake_engine_process.py"),
        log_format,
    ]
    with errors.open("w") as stderr:
        process = subprocess.Popen(argv, stderr=stderr, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as http:
            yield Serving(process, http, errors)
    finally:
        process.kill()
        process.wait()


def healthy(server: Serving) -> bool:
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_it_serves_and_ends_with_status_0_when_asked(tmp_path: Path):
    with serving(checkpoint(tmp_path / "slow:0.02"), tmp_path) as server:
        until(lambda: healthy(server), 30)
        body = {"model": str(tmp_path / "slow:0.02"), "prompt": "The fox", "max_tokens": 3}
        assert ok(server.http.post("/v1/completions", json=body))["usage"]["completion_tokens"] == 3
        chat = {"model": body["model"], "messages": [{"role": "user", "content": "hi"}]}
        assert (
            "no chat template"
            in error(server.http.post("/v1/chat/completions", json=chat), 400)["message"]
        )
        children = server.children()
        assert children
        with server.http.stream(
            "POST",
            "/v1/completions",
            json=body | {"max_tokens": 50, "stream": True, "ignore_eos": True},
        ) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(10) == 0
        assert "ready: http://127.0.0.1:" in server.errors.read_text()
        for child in children:
            until(lambda child=child: not Path(f"/proc/{child}").exists())


def test_it_ends_with_status_1_when_the_engine_is_killed(tmp_path: Path):
    with serving(checkpoint(tmp_path / "slow:0.02"), tmp_path) as server:
        until(lambda: healthy(server), 30)
        (child,) = server.children()
        os.kill(child, signal.SIGKILL)
        begin = time.monotonic()
        assert server.process.wait(10) == 1
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("name", "tokenizer", "text"),
    [
        ("missing", True, "no such file"),
        ("bug", True, "a bug in the builder"),
        ("x", False, "tokenizer"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(
    tmp_path: Path, name: str, tokenizer: bool, text: str
):
    with serving(checkpoint(tmp_path / name, tokenizer=tokenizer), tmp_path) as server:
        assert server.process.wait(30) == 2
        (line,) = [x for x in server.errors.read_text().splitlines() if x.startswith("refused:")]
        assert text in line


def test_a_port_in_use_is_known_before_anything_is_loaded(tmp_path: Path):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with serving("nonexistent", tmp_path, port) as server:
            assert server.process.wait(30) == 2
            assert f"cannot listen on 127.0.0.1:{port}" in server.errors.read_text()


def test_json_logs_are_one_object_a_line_from_both_processes(tmp_path: Path):
    model = checkpoint(tmp_path / "break:3")
    with serving(model, tmp_path, log_format="json") as server:
        until(lambda: healthy(server), 30)
        body = {"model": str(model), "prompt": "The fox", "max_tokens": 50, "ignore_eos": True}
        error(server.http.post("/v1/completions", json=body), 503)
        assert server.process.wait(10) == 1
        lines = [json.loads(line) for line in server.errors.read_text().splitlines()]
    assert {"onechip.server", "onechip.access", "onechip.engine"} <= {x["logger"] for x in lines}
    (ready,) = [line for line in lines if line.get("event") == "ready"]
    assert ready["message"].startswith("ready: http://127.0.0.1:")
    (broke,) = [line for line in lines if line["logger"] == "onechip.engine"]
    assert "told to break" in broke["exception"]
    (served,) = [line for line in lines if line["logger"] == "onechip.access"]
    assert (served["status"], served["error"]) == (503, "engine_failed")
