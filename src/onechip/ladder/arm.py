"""An arm: a server described by a TOML file, so that it can be started, measured and stopped without a person.

Owns the file's schema and its substitutions; starts nothing (`ladder.process` does). Shipped files lie in `arms/`; a
name without a slash or `.toml` is one of them, anything else is a path.

    schema = 1
    about = "what this is, and what of it was never tried"
    needs = "what must be installed first; printed when the start fails"

    [settings]                 # defaults; `--set KEY=VALUE` replaces them
    port = "free"              # a free port is picked
    [required]                 # settings without a default: KEY = "what to give"
    model = "a hub id or a directory"

    [start]                    # absent: the server is somebody else's, and is neither started nor stopped
    command = ["serve", "${model}", "--port", "${port}"]   # an argument list; no shell
    environment = { NAME = "value" }
    ready_s = 900              # from launch to the first answer

    [server]
    url = "http://127.0.0.1:${port}"
    health = "/health"         # 200 means ready; "" asks for an answer at once
    model = "${model}"         # the name requests carry; "" takes the first of /v1/models
    request = { cache_prompt = false }   # fields every request carries besides the common ones

    [stop]
    signal = "TERM"
    grace_s = 30               # then KILL; always to the whole process group
    command = ["docker", "rm", "-f", "x"]   # run afterwards, for what lives outside the group

    [record]                   # free text for the record, and commands whose output it keeps; `version`,
                               # `digest` (an image's) and `model_digest` have places of their own there
    engine = "vLLM"
    weights = "bf16"
    commands = { version = ["vllm", "--version"] }

A word that is exactly `${flags}` becomes as many words as that setting holds, quoted as in a shell, or none. `$$` is a
dollar sign. `${python}` is the interpreter onechip runs in, `${arms}` the folder of the shipped files, `${home}` the
user's.
"""

import shlex
import signal
import socket
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, cast

from onechip.errors import ConfigError

SCHEMA = 1
SHIPPED = Path(str(files("onechip.ladder") / "arms"))
_TABLES = {
    "": {"schema", "about", "needs", "settings", "required", "start", "server", "stop", "record"},
    "start": {"command", "environment", "ready_s"},
    "server": {"url", "health", "model", "request"},
    "stop": {"signal", "grace_s", "command"},
    "record": {"engine", "weights", "kv_cache_dtype", "commands"},
}


@dataclass(frozen=True)
class Start:
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ready_s: float


@dataclass(frozen=True)
class Stop:
    signal: signal.Signals
    grace_s: float
    command: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """Everything substituted. `start` is None for a server that already runs."""

    name: str
    about: str
    needs: str
    url: str
    health: str
    model: str
    request: Mapping[str, Any]
    start: Start | None
    stop: Stop
    engine: str
    weights: str
    kv_cache_dtype: str
    commands: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


def shipped() -> list[str]:
    """The names of the shipped arms."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load(name: str, settings: Mapping[str, str] | None = None) -> Arm:
    """Read the arm `name` and fill in `settings`. Raises ConfigError naming the file, the key and the remedy."""
    path, table = _read(name)
    return _Reader(path, table).arm(settings or {})


@dataclass(frozen=True)
class Description:
    """What an arm says of itself before anything is decided; `required` are the settings it must be given."""

    about: str
    needs: str
    required: tuple[str, ...]
    settings: tuple[str, ...]


def described(name: str) -> Description:
    """Raises ConfigError."""
    path, table = _read(name)
    return _Reader(path, table).description()


def _read(name: str) -> tuple[Path, dict[str, Any]]:
    path = Path(name)
    if path.suffix != ".toml" and "/" not in name:
        path = SHIPPED / f"{name}.toml"
    try:
        return path, tomllib.loads(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(shipped())
        raise ConfigError(
            f"no arm {name!r}: {error}; shipped are {known}; or give a path to a .toml file"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


class _Reader:
    """One file; every complaint names it and the key."""

    def __init__(self, path: Path, table: Mapping[str, Any]):
        self.path, self.table = path, table
        self.values: dict[str, str] = {}

    def arm(self, given: Mapping[str, str]) -> Arm:
        self._known_keys()
        self._settle(given)
        server, record = self._table("server"), self._table("record")
        return Arm(
            name=self.path.stem,
            about=self._text("about", self.table),
            needs=self._text("needs", self.table, ""),
            url=self._text("server.url", server).rstrip("/"),
            health=self._text("server.health", server, "/health"),
            model=self._text("server.model", server, ""),
            request=self._fill(server.get("request", {})),
            start=self._start() if "start" in self.table else None,
            stop=self._stop(),
            engine=self._text("record.engine", record, self.path.stem),
            weights=self._text("record.weights", record, ""),
            kv_cache_dtype=self._text("record.kv_cache_dtype", record, ""),
            commands={
                name: self._words(f"record.commands.{name}", words)
                for name, words in self._typed(
                    "record.commands", record.get("commands", {}), dict, "a table"
                ).items()
            },
            settings=dict(self.values),
        )

    def description(self) -> Description:
        self._known_keys()
        required, defaults = self._table("required"), self._table("settings")
        about, needs = self.table.get("about", ""), self.table.get("needs", "")
        return Description(
            " ".join(str(about).split()),
            " ".join(str(needs).split()),
            tuple(required),
            (*required, *defaults),
        )

    def _start(self) -> Start:
        table = self._table("start")
        environment = self._typed(
            "start.environment", table.get("environment", {}), dict, "a table"
        )
        return Start(
            self._words("start.command", table.get("command"), least=1),
            {name: self._text(f"start.environment.{name}", environment) for name in environment},
            self._seconds("start.ready_s", table.get("ready_s", 900)),
        )

    def _stop(self) -> Stop:
        table = self._table("stop")
        name = self._text("stop.signal", table, "TERM")
        if name not in ("TERM", "INT", "KILL", "QUIT", "HUP"):
            raise self._wrong("stop.signal", f"is {name!r}; give TERM, INT, QUIT, HUP or KILL")
        return Stop(
            signal.Signals[f"SIG{name}"],
            self._seconds("stop.grace_s", table.get("grace_s", 30)),
            self._words("stop.command", table.get("command", [])),
        )

    def _known_keys(self) -> None:
        if self.table.get("schema") != SCHEMA:
            raise self._wrong(
                "schema", f"is {self.table.get('schema')!r}; this version reads schema = {SCHEMA}"
            )
        for table, known in _TABLES.items():
            for key in self._table(table) if table else self.table:
                if key not in known:
                    name = f"{table}.{key}" if table else key
                    raise self._wrong(
                        name,
                        f"is not known; {table or 'the file'} may have {', '.join(sorted(known))}",
                    )

    def _settle(self, given: Mapping[str, str]) -> None:
        """Decide every setting: what was given, else the default."""
        required = {key: str(text) for key, text in self._table("required").items()}
        defaults = {key: str(value) for key, value in self._table("settings").items()}
        for key in given:
            if key not in required and key not in defaults:
                known = ", ".join(sorted(required | defaults)) or "none"
                raise ConfigError(f"{self.path}: no setting {key!r}; --set takes {known}")
        for key, text in required.items():
            if key not in given:
                raise ConfigError(
                    f"{self.path}: the setting {key!r} is needed; give --set {key}=... ({text})"
                )
        built_in = {
            "python": sys.executable,
            "arms": str(SHIPPED),
            "home": str(Path.home()),
            "name": self.path.stem,
        }
        self.values = built_in | defaults | dict(given)
        if self.values.get("port") == "free":
            self.values["port"] = str(_free_port())
        # A setting may use the others, e.g. served = "${model}".
        self.values = {
            key: Template(text).safe_substitute(self.values) for key, text in self.values.items()
        }

    def _fill(self, value: Any, key: str = "server.request") -> Any:
        """Substitute in every text of a nested value."""
        if isinstance(value, str):
            try:
                return Template(value).substitute(self.values)
            except (KeyError, ValueError) as error:
                raise self._wrong(
                    key, f"{value!r}: {error} is no setting; declare it, or write $$ for a dollar"
                ) from error
        if isinstance(value, dict):
            return {
                name: self._fill(each, key) for name, each in cast(dict[str, Any], value).items()
            }
        if isinstance(value, list):
            return [self._fill(each, key) for each in cast(list[Any], value)]
        return value

    def _table(self, name: str) -> dict[str, Any]:
        return self._typed(name, self.table.get(name, {}), dict, "a table")

    def _text(self, key: str, table: Mapping[str, Any], default: str | None = None) -> str:
        value = table.get(key.rpartition(".")[2], default)
        if value is None:
            raise self._wrong(key, "is missing; give a string")
        return self._fill(self._typed(key, value, str, "a string"), key)

    def _words(self, key: str, value: Any, least: int = 0) -> tuple[str, ...]:
        words = self._typed(key, value, list, 'a list of strings, as in ["vllm", "serve"]')
        if len(words) < least or not all(isinstance(word, str) for word in words):
            raise self._wrong(key, f"is {words!r}; give a list of strings, at least {least}")
        if "${flags}" in words and "flags" in self.values:
            at = words.index("${flags}")
            words = [
                *words[:at],
                *map(_literal, shlex.split(self.values["flags"])),
                *words[at + 1 :],
            ]
        return tuple(self._fill(word, key) for word in words)

    def _seconds(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise self._wrong(key, f"is {value!r}; give a number of seconds above 0")
        return float(value)

    def _typed(self, key: str, value: Any, wanted: type, words: str) -> Any:
        if not isinstance(value, wanted):
            raise self._wrong(
                key,
                f"is {value!r}; give {words}" if value is not None else f"is missing; give {words}",
            )
        return value

    def _wrong(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: {key} {why}")


def _literal(text: str) -> str:
    return text.replace("$", "$$")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
