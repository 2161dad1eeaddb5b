"""A server process for arms' tests: starts slowly, dies, forks, or ignores SIGTERM, as its arguments say.

    python arm_stub.py PORT [--delay S] [--die] [--die-after N] [--stubborn] [--child FILE] [--slow S]

It solves the questions of `test_eval_cli`: the answer is the number in the last line.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from scripted import Say, handler

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--die", action="store_true")
parser.add_argument("--die-after", type=int, default=10**9)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--child", type=Path)
options = parser.parse_args()
bodies: list[dict[str, Any]] = []


def solve(body: dict[str, Any]) -> Say:
    if len(bodies) > options.die_after:
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(9)
    content = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    found = re.findall(r"\d+", str(content))
    return Say(f"Answer: {found[-1] if found else 'none'}", delay=options.slow)


if options.stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.child:
    # A worker that outlives its parent unless the whole group is ended; it too may be stubborn by inheritance.
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    options.child.write_text(str(worker.pid))
print("loading", flush=True)
time.sleep(options.delay)
if options.die:
    print("no such model: gemma", file=sys.stderr)
    sys.exit(3)
ThreadingHTTPServer(("127.0.0.1", options.port), handler(solve, bodies, 4096)).serve_forever()
