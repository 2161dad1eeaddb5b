"""A server process for arms' tests: starts slowly, dies, forks, or ignores SIGTERM, as its arguments say.

    python arm_stub.py PORT [--delay S] [--die] [--stubborn] [--child FILE]

It answers GET /health and any POST with a small completion.
"""

import argparse
import http.server
import signal
import subprocess
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--die", action="store_true")
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--child", type=Path)
options = parser.parse_args()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(b'{"object": "list", "data": [{"id": "stub"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(
            b'{"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x"}}]}'
        )

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


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
http.server.ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
