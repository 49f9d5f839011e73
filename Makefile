# make run    install what is missing and serve the embedded model in the foreground
# make test   install what is missing and run everything that CI runs
# make test-NAME  one package's tests without the slow ones, such as `make test-cache`
# make test-clients  install agents with npm and litellm, and run the tests with them
# make check  lint, types, import contracts, structure and wording
# make check-page  types of the web page's scripts; needs npm
# make docs   write the generated parts of docs/
# make bench  kvd beside mlx_lm.server on the embedded model, some minutes (docs/performance.md)
#
# Needs Python 3.11 or newer and a package index. Uses uv where it is installed, else venv and pip.
# KVD_HOME (default ~/.kvd) holds socket, lock, config, logs and caches.

VENV ?= .venv
# The first of these that is new enough; `make PYTHON=…` overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; \
	done)
BIN := $(VENV)/bin
# Settings of pytest, such as `make test PYTEST_ARGS="-k cli"`.
PYTEST_ARGS ?=
# Test files that run at once: the long ones come first (tests/conftest.py). They share no state.
# Each computes on about one core, and waits for a part of its time: on two cores three take an
# eighth less than two.
JOBS ?= 3

# What `tools.check_wording` reads.
PROSE := kvd actors protocol tests bench tools deploy docs README.md CONTRIBUTING.md

# Settings of `bench.serve`, such as `make bench BENCH_ARGS="--runs 1 --traces steady"`.
BENCH_ARGS ?=

# axe-core for the tests of the web page, which skip what needs it where npm is missing.
AXE := axe-core@4.14.1

.PHONY: run test test-clients axe check check-page docs bench format clean

run: $(VENV)/.runtime
	@exec $(BIN)/kvd serve --model demo

test: check axe
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# One package's tests, such as `make test-cache`: tests/worker/cache, or tests/NAME.
test-%: $(VENV)/.dev
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" $(firstword $(wildcard tests/worker/$* tests/$*)) $(PYTEST_ARGS)

# Agents that the tests marked `clients` run. Other test runs skip those where they are missing.
CLIENTS := @openai/codex@0.169.0 opencode-ai@1.18.33
# Python's are in a folder of their own. litellm imports mcp for requests with tools.
PYTHON_CLIENTS := litellm==1.106.2 mcp==2.3.0

test-clients: $(VENV)/.dev
	npm install --silent --no-audit --no-fund --prefix $(VENV)/clients $(CLIENTS)
	@if command -v uv >/dev/null; \
	then uv pip install --quiet --python $(BIN)/python --target $(VENV)/clients/python $(PYTHON_CLIENTS); \
	else $(BIN)/python -m pip install --quiet --upgrade --target $(VENV)/clients/python $(PYTHON_CLIENTS); fi
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -q -m clients $(PYTEST_ARGS)

# Only with Chromium, without which nothing needs it.
axe: | $(VENV)/.dev
	@if command -v npm >/dev/null && command -v chromium >/dev/null && ! [ -d $(VENV)/clients/node_modules/axe-core ]; \
	then npm install --silent --no-audit --no-fund --prefix $(VENV)/clients $(AXE) || echo "axe-core is not installed; going on without" >&2; fi

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_structure
	$(BIN)/python -m tools.check_wording $(PROSE)

# The types of the page's scripts, from their comments.
check-page:
	npm install --silent --no-audit --no-fund --prefix $(VENV)/clients typescript@5.9.3
	$(VENV)/clients/node_modules/.bin/tsc -p tests/page

docs: $(VENV)/.dev
	$(BIN)/python -m tools.docs

bench: $(VENV)/.dev
	@exec $(BIN)/python -m bench.serve $(BENCH_ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvd needs Python 3.11 or newer; make PYTHON=/path/to/python" >&2; exit 1; }
	@if command -v uv >/dev/null; then uv venv --python "$(PYTHON)" $(VENV); \
	else "$(PYTHON)" -m venv $(VENV); fi

# The stamps are older than pyproject.toml when the dependencies may have changed.
$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "installing kvd into $(VENV)" >&2
	@if command -v uv >/dev/null; then uv pip install --python $(BIN)/python -e .; \
	else $(BIN)/python -m pip install --quiet -e .; fi
	@touch $@

# Dependency groups need pip 25.1.
$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing kvd and its tools into $(VENV)" >&2
	@if command -v uv >/dev/null; then uv pip install --python $(BIN)/python -e . --group dev; \
	else $(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1' \
	&& $(BIN)/python -m pip install --quiet -e . --group dev; fi
	@touch $@ $(VENV)/.runtime
