"""`onechip.engine.process` with the fake engine: what tests start in place of the real engine process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes import build

from onechip.engine.process import main

if __name__ == "__main__":
    sys.exit(main(build, *sys.argv[1:]))
