# Everything sets itself up: a fresh machine needs only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
N ?= 50

.PHONY: train test slow long soak prove check docs format clean

train: $(VENV)/.base
	$(BIN)/bessemer train
	@echo "source $(BIN)/activate brings the command bessemer into this shell"

# Most of a test is compiling: these ask the compiler for less. What learns in many steps, and `make long`, runs as users do.
# Hundreds of processes are started: each finds Python's compiled files of the one before it, whatever the shell says of them.
QUICK = PYTHONDONTWRITEBYTECODE= JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$$($(BIN)/python -m tests.quick)"

test: $(VENV)/.test
	$(QUICK) $(BIN)/pytest -n $(WORKERS) --dist loadfile

slow: $(VENV)/.test $(VENV)/.chromium
	$(QUICK) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow and not gpu"

long: $(VENV)/.test
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "long and not gpu"

soak: $(VENV)/.test
	$(BIN)/python -m tests.faults.soak --kills $(N)

prove: $(VENV)/.test
	$(BIN)/python -m tests.prove

check: $(VENV)/.test docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation as a site in site/, readable without a server or a network. A link that leads nowhere is an error
# (with --quiet it would not be: warnings are then dropped before --strict counts them).
docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# With the page and the server: whoever has trained a model wants to look at it.
$(VENV)/.base: $(BIN)/python pyproject.toml
	@echo "installing into $(VENV): a minute or so"
	$(BIN)/python -m pip install --quiet --editable ".[dash]"
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $@ $(VENV)/.base

# The page's tests drive a real browser. Where Debian's cannot be installed they are skipped, and say so.
$(VENV)/.chromium: $(VENV)/.test
	command -v chromium || (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium) \
		&& touch $@ || echo "no Chromium could be installed: the page's tests in a browser are skipped"

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
