# Needs python3 (3.11 to 3.13, with venv) and make. Everything else comes from requirements.lock.
#
#   make serve      the embedded demo model on http://127.0.0.1:8000
#   make test       the test suite
#   make check      style, types and layering
#   make bench-cpu  this engine against llama.cpp, same file, same machine
#   make docs       docs/api.md, from the code
#   make bench-client  how many streamed tokens a second the ladder's client follows
#   make screenshots  the web page's, under docs/ (needs Chromium)
#   make lock       write requirements.lock anew (needs uv)
#   make clean      remove the environment and every cache

PYTHON ?= python3
PORT ?= 8000
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: docs install serve test check format bench-cpu bench-client screenshots lock clean

install: $(STAMP)

# The stamp is written last, so an interrupted install is taken up again. For another PYTHON: make clean first.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "onechip needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is not one. Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' lacks venv or ensurepip. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

serve: $(STAMP)
	$(BIN)/onechip serve demo --port $(PORT)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(STAMP)
	$(BIN)/python benchmarks/cpu_peer.py $(ARGS)

screenshots: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.screenshots

bench-client: $(STAMP)
	$(BIN)/python benchmarks/ladder_client.py $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m onechip.server.surface > docs/api.md

lock:
	uv pip compile --universal --generate-hashes --python-version 3.11 --extra demo --extra report --extra otel --group dev \
	  --no-emit-index-url --no-header --quiet pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
