"""The conversation in the terminal.

1. At a terminal: read a message (readline, many lines if wanted) or a /command; answer; again.
2. In a pipe: all of stdin is one message, its answer goes to stdout and nothing else does.
3. Ctrl-C while an answer comes closes the connection, which aborts the request; what was said stays in the
   conversation. Ctrl-C at the prompt leaves if the one before it did not start anything new.

Exit status: 0 left, 1 the answer failed (pipe), 130 left with Ctrl-C.
"""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from onechip.errors import OnechipError
from onechip.terminal.client import Chunk, Server, stream_chat
from onechip.terminal.commands import run
from onechip.terminal.screen import Screen
from onechip.terminal.session import Session, Stats

HISTORY_LINES = 2000
BLOCK = '"""'


@dataclass(frozen=True)
class Chat:
    """One conversation: with whom, what, and where it is shown."""

    server: Server
    session: Session
    screen: Screen


def pipe(chat: Chat, message: str) -> int:
    """Answer one message; the answer alone goes to stdout."""
    chat.session.messages.append({"role": "user", "content": message})
    return {"done": 0, "failed": 1, "interrupted": 130}[answer(chat)]


def converse(chat: Chat, history: Path | None) -> int:
    """Talk until the person leaves."""
    read = _reader(history)
    warned = False
    while True:
        try:
            line = read_message(read)
            warned = bool(line) and take(chat, line) == "interrupted"
        except KeyboardInterrupt:
            chat.screen.note("")
            if warned:
                return 130
            warned = True
            chat.screen.note("Ctrl-C again leaves.")
        except EOFError:
            chat.screen.note("")
            return 0


def take(chat: Chat, line: str) -> str:
    """One line of a person: a command or a message. Raises EOFError to leave."""
    if not line.startswith("/"):
        chat.session.messages.append({"role": "user", "content": line})
        return answer(chat)
    try:
        result = run(chat.session, line)
    except OnechipError as error:
        chat.screen.error(error.message)
        return "done"
    if result.text:
        chat.screen.note(result.text)
    if result.then == "leave":
        raise EOFError
    return answer(chat) if result.then == "answer" else "done"


def answer(chat: Chat) -> str:
    """Stream the answer to the last message: "done", "failed" or "interrupted"."""
    said: list[str] = []
    begun, stats, outcome = time.monotonic(), Stats(), "done"
    try:
        with closing(stream_chat(chat.server, chat.session.body())) as chunks:
            for chunk in chunks:
                _show(chat.screen, chunk, said)
                _count(stats, chunk, time.monotonic() - begun)
        chat.screen.end()
    except KeyboardInterrupt:
        outcome = "interrupted"
        chat.screen.end()
        chat.screen.note("stopped")
    except OnechipError as error:
        outcome = "failed"
        chat.screen.error(error.message)
    stats.total = time.monotonic() - begun
    chat.session.finish("".join(said), stats)
    if outcome == "done":
        chat.screen.note(stats.line())
    return outcome


def _show(screen: Screen, chunk: Chunk, said: list[str]) -> None:
    if chunk.thought:
        screen.thought(chunk.thought)
    if chunk.text:
        screen.text(chunk.text)
        said.append(chunk.text)
    for call in chunk.calls:  # no tools are sent, but a server may add its own
        function = call.get("function") or {}
        name = f"\n{function['name']} " if function.get("name") else ""
        screen.text(name + (function.get("arguments") or ""))
    if chunk.finish == "length":
        screen.end()
        screen.note("cut at the token limit")


def _count(stats: Stats, chunk: Chunk, seconds: float) -> None:
    if stats.first is None and (chunk.text or chunk.thought or chunk.calls):
        stats.first = seconds
    if chunk.usage:
        stats.prompt_tokens = chunk.usage.get("prompt_tokens")
        stats.completion_tokens = chunk.usage.get("completion_tokens")


def read_message(read: Callable[[str], str]) -> str:
    r"""One message: a line, lines that end in \, or everything between two lines of triple quotes."""
    line = read("> ")
    if line.strip().startswith(BLOCK):
        return _block(read, line.strip().removeprefix(BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(". "))
    return "\n".join(lines).strip()


def _block(read: Callable[[str], str], first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(BLOCK):
        lines.append(read(". "))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip("\n")


def _reader(history: Path | None) -> Callable[[str], str]:
    """`input` with line editing and a history that lasts, where the platform has readline."""
    try:
        import readline
    except ImportError:
        return input
    readline.set_history_length(HISTORY_LINES)
    if history is not None:
        with suppress(OSError):  # no history yet, or none that can be read: begin with an empty one
            readline.read_history_file(history)

    def read(prompt: str) -> str:
        line = input(prompt)
        if history is not None:
            with suppress(OSError):  # a full disk must not end a conversation
                history.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(history)
                history.chmod(0o600)
        return line

    return read
