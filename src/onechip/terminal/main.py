"""`onechip chat` from its arguments to its exit status: whom to talk to, and whether a person or a pipe is speaking."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from onechip.errors import InvalidRequest
from onechip.terminal.chat import Chat, converse, pipe
from onechip.terminal.client import Server, first_model, server_at
from onechip.terminal.local import ServerEnded, local_server
from onechip.terminal.screen import Screen
from onechip.terminal.session import Session

DEFAULT_URL = "http://127.0.0.1:8000"
HISTORY = Path(".cache") / "onechip" / "chat_history"


def chat(
    model: str | None,
    engine: Sequence[str],
    url: str | None,
    name: str | None,
    system: str,
    key: str | None,
    *,
    thinking: bool,
) -> int:
    """Talk to `model`, served here with the flags `engine`, or to the server at `url`; returns the exit status."""
    here = local_server(model, engine) if model else nullcontext(server_at(url or DEFAULT_URL, key))
    try:
        with here as server:
            return _talk(server, name, system, thinking=thinking)
    except ServerEnded as ended:
        return ended.status


def _talk(server: Server, name: str | None, system: str, *, thinking: bool) -> int:
    piped = not sys.stdin.isatty()
    session = Session(name or first_model(server), system=system, thinking=thinking)
    styled = sys.stdout.isatty() and not piped
    talk = Chat(server, session, Screen(sys.stdout, color=styled, quiet=piped))
    if piped:
        message = sys.stdin.read().strip()
        if not message:
            raise InvalidRequest("nothing to answer: stdin is empty")
        return pipe(talk, message)
    talk.screen.note(f"{session.model} at {server.base}. /help lists commands.")
    return converse(talk, Path.home() / HISTORY)
