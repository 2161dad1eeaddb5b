"""`onechip chat` as a person meets it, at a pseudo-terminal, and as a pipe does, over HTTP servers with scripts."""

import os
import pty
import re
import readline
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fakes import FakeEngine
from tests.scripted import Answer, refusal, scripted, text, thought
from tests.server.harness import running, until
from tests.tiny_tokenizer import TURN_END, byte_ids

from onechip.terminal.local import ServerEnded, local_server

COMMAND = (sys.executable, "-m", "onechip.cli", "chat")
# Ctrl-C reaches only the processes whose controlling terminal it is typed at.
LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "onechip.cli", "chat", *sys.argv[1:]])
"""
AT_A_TERMINAL = (sys.executable, "-c", LAUNCH)
CTRL_C, CTRL_D = "\x03", "\x04"
SETTLED_S = 0.3
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")


@dataclass
class Terminal:
    """A person at a keyboard: types, and reads what has appeared since the last look."""

    process: subprocess.Popen[bytes]
    screen: int
    seen: str = ""

    def type(self, keys: str) -> None:
        if (
            keys == CTRL_C
        ):  # Python's line reader loses one that comes between its prompt and its first wait for a key
            time.sleep(SETTLED_S)
        os.write(self.screen, keys.encode())

    def until(self, wanted: str, seconds: float = 10) -> str:
        """What appears up to and including `wanted` (a pattern)."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(wanted, self.seen, re.DOTALL)):
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} did not appear; the screen shows {self.seen!r}"
            if select.select([self.screen], [], [], left)[0]:
                self.seen += self._read()
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def status(self) -> int:
        return self.process.wait(10)

    def _read(self) -> str:
        try:
            return os.read(self.screen, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # the other side has closed
            time.sleep(0.05)
            return ""


@contextmanager
def terminal(url: str, home: Path, *arguments: str) -> Iterator[Terminal]:
    screen, keyboard = pty.openpty()
    environment = os.environ | {"HOME": str(home), "TERM": "xterm", "INPUTRC": "/dev/null"}
    environment.pop("ONECHIP_API_KEY", None)
    process = subprocess.Popen(
        [*AT_A_TERMINAL, "--url", url, *arguments],
        stdin=keyboard,
        stdout=keyboard,
        stderr=keyboard,
        env=environment,
        start_new_session=True,
    )
    os.close(keyboard)
    try:
        yield Terminal(process, screen)
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def piped(
    url: str, message: str, *arguments: str, home: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--url", url, *arguments]
    environment = os.environ | ({"HOME": str(home)} if home else {})
    return subprocess.run(
        command,
        input=message,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=environment,
    )


# At a terminal


def test_answers_stream_and_the_conversation_goes_on(tmp_path: Path):
    with scripted(text("Hello there.", pause=0.05), text("And again.")) as server:
        with terminal(server.url, tmp_path) as at:
            at.until("/help")
            at.until("> ")
            at.type("hi\r")
            at.until("Hell")
            assert server.left == 0
            at.until(r"o there\.\n")
            assert "first after" in at.until("prompt 12 tokens")
            at.type("more\r")
            at.until(r"And again\.")
            at.until("> ")
            at.type("/exit\r")
            assert at.status() == 0
        assert [m["content"] for m in server.bodies[1]["messages"]] == [
            "hi",
            "Hello there.",
            "more",
        ]


def test_thoughts_are_dim_and_not_part_of_the_conversation(tmp_path: Path):
    with (
        scripted(thought("Let me see.", "Done.")) as server,
        terminal(server.url, tmp_path, "--thinking") as at,
    ):
        at.until("> ")
        at.type("hi\r")
        shown = at.until(r"Done\.")
        assert re.search(r"\x1b\[2mLet me see\.\x1b\[0m\n\nDone\.", shown)
        assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
        at.until("> ")
        at.type("more\r")
        until(lambda: len(server.bodies) == 2)
        assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Done."}


def test_ctrl_c_aborts_the_request_keeps_what_was_said_and_leaves_when_pressed_again(
    tmp_path: Path,
):
    engine = FakeEngine(max_model_len=100_000, sleep=0.02, script=byte_ids("abc "))
    with running(engine) as server, terminal(server.url, tmp_path) as at:
        at.until("> ")
        at.type("hi\r")
        at.until("abc   ")
        at.type(CTRL_C)
        at.until("stopped")
        until(lambda: not engine.rows and len(engine.aborted) == 1)
        at.until("> ")
        at.type("go on\r")
        at.until("abc   ")
        assert len(engine.seen[1].prompt_ids) > len(engine.seen[0].prompt_ids) + len("abc   ")
        at.type(CTRL_C)
        at.until("stopped.*> ")
        at.type(CTRL_C)
        assert at.status() == 130


def test_ctrl_c_while_nothing_has_come_yet_sets_the_message_aside(tmp_path: Path):
    with (
        scripted(text("late", pause=30), text("Now.")) as server,
        terminal(server.url, tmp_path) as at,
    ):
        at.until("> ")
        at.type("hi\r")
        until(lambda: len(server.bodies) == 1)
        at.type(CTRL_C)
        at.until("stopped.*> ")
        until(lambda: server.left == 1)
        at.type("/retry\r")
        at.until(r"Now\.")
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("keys", "status"), [(CTRL_C + CTRL_C, 130), (CTRL_D, 0), ("/quit\r", 0)])
def test_ways_to_leave(tmp_path: Path, keys: str, status: int):
    with scripted(text("Ok.")) as server, terminal(server.url, tmp_path) as at:
        for key in re.findall(r"/\w+\r|.", keys):
            at.until("> ")
            at.type(key)
        assert at.status() == status


def test_one_ctrl_c_at_the_prompt_only_clears_the_line(tmp_path: Path):
    with scripted(text("Ok.")) as server, terminal(server.url, tmp_path) as at:
        at.until("> ")
        at.type("half a thought")
        at.until("half a thought")
        at.type(CTRL_C)
        at.until("Ctrl-C again leaves.*> ")
        at.type("hi\r")
        at.until(r"Ok\.")
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
        at.until("> ")
        at.type("x")
        at.until("x")
        at.type(CTRL_C)
        at.until("> ")
        assert at.process.poll() is None


def test_many_lines_and_commands(tmp_path: Path):
    with scripted(text("Ok.")) as server, terminal(server.url, tmp_path) as at:
        at.until("> ")
        at.type("/system Be brief.\r")
        at.until("system prompt set.*> ")
        at.type("/set temperature 0.2\r")
        at.until("temperature = 0.2.*> ")
        at.type("/wrong\r")
        at.until("no command /wrong.*> ")
        at.type('"""\r')
        at.until(r"\. ")
        at.type("one\r")
        at.until(r"\. ")
        at.type('two"""\r')
        at.until(r"Ok\..*> ")
        (body,) = server.bodies
        assert body["temperature"] == 0.2
        assert [m["content"] for m in body["messages"]] == ["Be brief.", "one\ntwo"]
        at.type(f"/save {tmp_path}/c.json\r")
        at.until("saved 2 messages.*> ")
        at.type("/clear\r")
        at.until("new conversation.*> ")
        at.type(f"/load {tmp_path}/c.json\r")
        at.until("loaded 2 messages.*> ")
        at.type("/stats\r")
        at.until("2 messages; no answer yet")


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="needs GNU readline")
def test_a_pasted_text_is_one_message(tmp_path: Path):
    with scripted(text("Ok.")) as server, terminal(server.url, tmp_path) as at:
        at.until("> ")
        at.type("\x1b[200~one\n\n  two\x1b[201~\r")
        at.until(r"Ok\.")
        assert [m["content"] for m in server.bodies[0]["messages"]] == ["one\n\n  two"]


def test_the_history_is_kept_for_the_user_alone(tmp_path: Path):
    with scripted(text("Ok.")) as server:
        with terminal(server.url, tmp_path) as at:
            at.until("> ")
            at.type("remember me\r")
            at.until(r"Ok\..*> ")
            at.type(CTRL_D)
            assert at.status() == 0
        path = tmp_path / ".cache" / "onechip" / "chat_history"
        assert "remember me" in path.read_text()
        assert path.stat().st_mode & 0o077 == 0
        with terminal(server.url, tmp_path) as at:
            at.until("> ")
            at.type("\x1b[A\r")
            at.until(r"Ok\.")
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "remember me"}]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            refusal(503, "the queue is full", "queue_full"),
            r"the queue is full \(HTTP 503\).*try again",
        ),
        (refusal(400, "temperature is 9", "invalid"), r"temperature is 9 \(HTTP 400\)"),
        (Answer([{"content": "Half"}], cut=True), "broke off"),
        (
            Answer([{"content": "Half"}], error={"message": "engine gone", "code": "x"}),
            "engine gone",
        ),
    ],
)
def test_an_answer_that_fails_says_why_and_the_chat_goes_on(
    tmp_path: Path, answer: Answer, told: str
):
    with scripted(answer, text("Back.")) as server, terminal(server.url, tmp_path) as at:
        at.until("> ")
        at.type("hi\r")
        at.until(told)
        at.until("> ")
        at.type("/retry\r")
        at.until(r"Back\.")
        assert server.bodies[1]["messages"] == [{"role": "user", "content": "hi"}]


def test_an_answer_cannot_steer_the_terminal(tmp_path: Path):
    with (
        scripted(text("a\x1b[2J\x1b]0;title\x07b", 1)) as server,
        terminal(server.url, tmp_path) as at,
    ):
        at.until("> ")
        at.type("hi\r")
        assert "\x1b[2J" not in at.until("titleb")


# In a pipe


def test_a_pipe_gets_the_answer_and_nothing_else():
    with scripted(thought("Hm.", "Line one.\nLine two.")) as server:
        done = piped(server.url, "hi\nthere\n")
        assert (done.returncode, done.stdout, done.stderr) == (0, "Line one.\nLine two.\n", "")
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi\nthere"}]


def test_a_pipe_works_with_the_real_server_and_its_key():
    from onechip.config import ServerConfig

    engine = FakeEngine(script=[*byte_ids("Yes."), TURN_END])
    with running(engine, config=ServerConfig(api_keys=("secret",))) as server:
        done = piped(server.url, "hi", "--api-key", "secret", "--system", "Be brief.")
        assert (done.returncode, done.stdout) == (0, "Yes.\n")
        refused = piped(server.url, "hi")
        assert refused.returncode == 1
        assert "--api-key" in refused.stderr and len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "answer", [refusal(500, "bug", "x"), Answer([{"content": "Half"}], cut=True)]
)
def test_a_pipe_whose_answer_fails_ends_with_status_1(answer: Answer):
    with scripted(answer) as server:
        done = piped(server.url, "hi")
        assert done.returncode == 1
        assert done.stderr.startswith("onechip: error: ")
        assert done.stdout in ("", "Half\n")


def test_wrong_uses_are_one_line():
    cases = [
        (("--url", "http://127.0.0.1:9", "x"), 2, "not both"),
        (("--url", "http://127.0.0.1:9", "--dtype", "float32"), 2, "--dtype"),
        (("--url", "ftp://x"), 2, "not an address"),
        (("--url", "http://127.0.0.1:9"), 1, "is the server running"),
    ]
    for arguments, status, told in cases:
        done = subprocess.run(
            [*COMMAND, *arguments], input="hi", capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done
        assert told in done.stderr and len(done.stderr.splitlines()) == 1


def test_talking_to_a_server_imports_neither_jax_nor_numpy():
    script = (
        "import sys; from onechip.cli import run; status = run(['chat', '--url', sys.argv[1]]);"
        "print([m for m in ('jax', 'numpy', 'starlette') if m in sys.modules], status)"
    )
    with scripted(text("Ok.")) as server:
        command = [sys.executable, "-c", script, server.url]
        done = subprocess.run(command, input="hi", capture_output=True, text=True, check=True)
        assert done.stdout == "Ok.\n[] 0\n"


# A server of one's own

FAKE_SERVE = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

model, arguments = sys.argv[1], sys.argv[2:]
if model == "missing":
    print("onechip: error: missing: no such file", file=sys.stderr)
    sys.exit(2)
time.sleep(0.3)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(repr(arguments).encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def test_a_model_is_served_on_a_free_port_while_the_chat_runs(tmp_path: Path):
    fake = tmp_path / "serve.py"
    fake.write_text(FAKE_SERVE)
    before = signal.getsignal(signal.SIGTERM)
    with local_server("m", ["--dtype", "float32"], (sys.executable, str(fake))) as server:
        import httpx

        url = server.base.removesuffix("/v1") + "/health"
        assert "'--dtype', 'float32'" in httpx.get(url, trust_env=False).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_model_that_cannot_be_served_ends_the_chat_with_the_servers_status(tmp_path: Path):
    fake = tmp_path / "serve.py"
    fake.write_text(FAKE_SERVE)
    with (
        pytest.raises(ServerEnded) as ended,
        local_server("missing", [], (sys.executable, str(fake))),
    ):
        pass
    assert ended.value.status == 2


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ([], ["--max-seqs", "1"]),
        (["--max-seqs", "16"], []),
        (["--dtype", "float32", "--max-seqs", "4"], ["--max-seqs", "4", "--dtype", "float32"]),
        (
            ["--random-weights", "--no-precompile"],
            ["--max-seqs", "1", "--random-weights", "--no-precompile"],
        ),
    ],
)
def test_engine_flags_reach_the_server_as_they_were_given(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], arguments: list[str]
):
    from onechip import cli
    from onechip.terminal import main

    given: list[list[str]] = []
    monkeypatch.setattr(main, "chat", lambda model, engine, *_, **__: given.append(engine) or 0)
    assert cli.run(["chat", "demo", *flags]) == 0
    assert given == [arguments]
