"""The /commands: one table of what can be typed, what it does to the session, and its help."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onechip.errors import InvalidRequest
from onechip.terminal.session import NAMES, Session, Stats

Next = Literal["go on", "answer", "leave"]


@dataclass(frozen=True)
class Result:
    """What a command says, and what happens next: "answer" asks the model again, "leave" ends the program."""

    text: str = ""
    then: Next = "go on"


@dataclass(frozen=True)
class Command:
    """`argument` as help shows it; in [] it may be left out."""

    name: str
    argument: str
    help: str
    run: Callable[[Session, str], Result]


def run(session: Session, line: str) -> Result:
    """Do what a line that begins with / says. Raises InvalidRequest for what is not a command or has a wrong value."""
    name, _, argument = line[1:].partition(" ")
    found = [command for command in COMMANDS if name in command.name.split("|")]
    if not found:
        raise InvalidRequest(f"no command /{name}; /help lists them")
    (command,) = found
    argument = argument.strip()
    if command.argument and not command.argument.startswith("[") and not argument:
        raise InvalidRequest(f"/{name} needs {command.argument}: {command.help}")
    return command.run(session, argument)


def _help(_: Session, __: str) -> Result:
    names = [f"/{c.name.replace('|', ', /')} {c.argument}".rstrip() for c in COMMANDS]
    width = max(map(len, names)) + 2
    rows = [f"{name:<{width}}{c.help}" for name, c in zip(names, COMMANDS, strict=True)]
    return Result("\n".join((*rows, "", *KEYS)))


def _system(session: Session, text: str) -> Result:
    if not text:
        return Result(f"system prompt: {session.system}" if session.system else "no system prompt")
    session.system = "" if text == "none" else text
    return Result("system prompt set" if session.system else "no system prompt any more")


def _thinking(session: Session, text: str) -> Result:
    switches = {"on": True, "off": False, "": not session.thinking}
    if text not in switches:
        raise InvalidRequest(f"/thinking takes on or off, not {text!r}")
    session.thinking = switches[text]
    return Result(f"thinking {'on' if session.thinking else 'off'}")


def _set(session: Session, text: str) -> Result:
    if text:
        name, _, value = text.partition(" ")
        session.set(name, value.strip())
        if name not in session.settings:
            return Result(f"{name}: left to the server")
    shown = [f"{name} = {value}" for name, value in session.settings.items()]
    return Result("\n".join(shown) or f"nothing set; there are {', '.join(NAMES)}")


def _clear(session: Session, _: str) -> Result:
    session.messages.clear()
    session.pending = None
    session.last = Stats()
    return Result("a new conversation")


def _retry(session: Session, _: str) -> Result:
    if not session.again():
        raise InvalidRequest("nothing to answer again yet")
    return Result(then="answer")


def _save(session: Session, path: str) -> Result:
    session.save(Path(path))
    return Result(f"saved {len(session.messages)} messages to {path}")


def _load(session: Session, path: str) -> Result:
    session.load(Path(path))
    return Result(f"loaded {len(session.messages)} messages from {path}")


def _stats(session: Session, _: str) -> Result:
    return Result(f"{session.model}: {len(session.messages)} messages; {session.last.line()}")


def _exit(_: Session, __: str) -> Result:
    return Result(then="leave")


KEYS = (
    'Enter sends. A line that ends in \\ goes on; """ begins and ends a text of many lines; pasted lines are one.',
    "Ctrl-C stops an answer, and leaves when pressed again. Ctrl-D leaves.",
)
COMMANDS = (
    Command("help", "", "this list", _help),
    Command("system", "[TEXT | none]", "show or set the system prompt", _system),
    Command("thinking", "[on | off]", "let the model think before it answers", _thinking),
    Command("set", "[NAME [VALUE]]", "show or set sampling, for example temperature 0.2", _set),
    Command("retry", "", "answer the last message again", _retry),
    Command("clear|new", "", "begin a new conversation", _clear),
    Command("save", "FILE", "write the conversation as JSON", _save),
    Command("load", "FILE", "take up a saved conversation", _load),
    Command("stats", "", "tokens and times of the last answer", _stats),
    Command("exit|quit", "", "leave", _exit),
)
