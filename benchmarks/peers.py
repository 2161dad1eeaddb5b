"""The engines a benchmark compares, each as a local HTTP server: how it is installed, started, quieted and ended.

Peers live in a cache directory of their own and are no dependency of the project. Owns processes; refuses to know
what is measured.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onechip.ladder.arm import SHIPPED

HERE = Path(__file__).parent
XLLAMACPP = "xllamacpp==2026.10.11549"
NODE_LLAMA_CPP = "3.22.1"
START_LIMIT_S = 900  # a first start compiles
SPINS = 0.02  # cores an idle server may use before it is stopped while others are measured


@dataclass(frozen=True)
class Engine:
    """A server to start: its command, and fields it needs in a request beyond the common ones."""

    name: str
    version: str
    command: tuple[str, ...]
    extra_fields: Mapping[str, object]


@dataclass(frozen=True)
class Running:
    """A started server; its process leads a group that holds every process it starts."""

    engine: Engine
    port: int
    process: subprocess.Popen[bytes]
    startup_s: float

    def cpu_seconds(self) -> float:
        """Processor time of the whole group so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                values = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(values[2]) == self.process.pid:
                ticks += int(values[11]) + int(values[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        """Stop the group if it spins while idle."""
        before = self.cpu_seconds()
        time.sleep(0.5)
        if (self.cpu_seconds() - before) / 0.5 > SPINS:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)


def onechip(*, slots: int, context: int, flags: tuple[str, ...]) -> Engine:
    from importlib.metadata import version

    limits = ("--max-seqs", str(slots), "--max-model-len", str(context))
    command = (sys.executable, "-m", "onechip.cli", "serve", "demo", *limits, *flags)
    return Engine("onechip", version("onechip"), (*command, "--port", "{port}"), {})


def llamacpp(gguf: Path, cache: Path, *, slots: int, context: int, threads: int) -> Engine:
    python = cache / "xllamacpp" / "bin" / "python"
    sizes = ("--slots", str(slots), "--context", str(context), "--threads", str(threads))
    script = str(SHIPPED / "xllamacpp_server.py")
    command = (str(python), script, str(gguf), *sizes, "--port", "{port}")
    return Engine("llama.cpp", XLLAMACPP, command, {"cache_prompt": False})


def llamacpp_node(gguf: Path, cache: Path, *, slots: int, context: int, threads: int) -> Engine:
    modules = cache / "node" / "node_modules"
    sizes = (str(slots), str(context), str(threads))
    command = ("node", str(HERE / "llamacpp_node.mjs"), str(modules), str(gguf), "{port}", *sizes)
    return Engine("llama.cpp (node)", f"node-llama-cpp=={NODE_LLAMA_CPP}", command, {})


def set_up_llamacpp(cache: Path) -> None:
    """Install xllamacpp into a virtual environment under `cache`, once."""
    home = cache / "xllamacpp"
    stamp = home / f".{XLLAMACPP}"
    if stamp.exists():
        return
    print(f"installing {XLLAMACPP} into {home}", file=sys.stderr)
    venv.create(home, clear=True, with_pip=True)
    pip = (str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", XLLAMACPP)
    subprocess.run(pip, check=True)
    stamp.touch()


def set_up_node(cache: Path) -> None:
    """Install node-llama-cpp with its prebuilt binary for this platform under `cache`, once."""
    if shutil.which("npm") is None:
        sys.exit("the peer 'node' needs node and npm; install them or leave the peer out")
    home = cache / "node"
    stamp = home / f".{NODE_LLAMA_CPP}"
    if stamp.exists():
        return
    print(f"installing node-llama-cpp {NODE_LLAMA_CPP} into {home}", file=sys.stderr)
    home.mkdir(parents=True, exist_ok=True)
    machine = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}[os.uname().machine]
    names = (f"node-llama-cpp@{NODE_LLAMA_CPP}", f"@node-llama-cpp/{machine}@{NODE_LLAMA_CPP}")
    flags = ("--prefix", str(home), "--ignore-scripts", "--omit=optional", "--silent")
    subprocess.run(("npm", "install", *flags, *names), check=True)
    stamp.touch()


@contextmanager
def started(engine: Engine, log: Path, threads: int) -> Iterator[Running]:
    """Run `engine` on a free port until the block ends. Exits with its log's last lines if it does not come up."""
    port = _free_port()
    command = [part.format(port=port) for part in engine.command]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        _wait_until_ready(process, port, engine, log)
        yield Running(engine, port, process, time.monotonic() - begun)
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, engine: Engine, log: Path
) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    sys.exit(f"{engine.name} did not come up (status {process.poll()}); the end of {log}:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: politely, then not."""
    for name in (signal.SIGCONT, signal.SIGTERM):
        _signal(process, name)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait(20)


def _signal(process: subprocess.Popen[bytes], name: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, name)
