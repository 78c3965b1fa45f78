# Everything sets itself up: a fresh machine needs only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SCALE := .venv-scale
SERVICES := .venv-services
LOWEST := .venv-lowest
WORKERS ?= 2
N ?= 50

# Exact versions of everything that is installed, one file per version of Python (`make constraints`). A Python without
# a file gets the newest versions that pyproject.toml allows.
PINNED = $(wildcard constraints/$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt)
INSTALL = python -m pip install --quiet $(if $(PINNED),--constraint $(PINNED))

.PHONY: train test slow long scale services lowest constraints soak prove reference check docs format clean

train: $(VENV)/.base
	$(BIN)/bessemer train
	@echo "source $(BIN)/activate brings the command bessemer into this shell"

# Most of a test is compiling: these ask the compiler for less. What learns in many steps, and `make long`, runs as users do.
# Hundreds of processes start; PYTHONDONTWRITEBYTECODE is cleared so that they share compiled bytecode.
QUICK = PYTHONDONTWRITEBYTECODE= JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS="$$($(BIN)/python -m tests.quick)"

test: $(VENV)/.test
	$(QUICK) $(BIN)/pytest -n $(WORKERS) --dist loadfile

slow: $(VENV)/.test $(VENV)/.chromium
	$(QUICK) $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "slow and not long and not gpu"

long: $(VENV)/.test
	$(BIN)/pytest -n $(WORKERS) --dist loadfile -m "long and not gpu"

# Every test that the others skip because a package is missing: torch, transformers, TRL, PEFT, lm-eval, libtpu, JAX's
# CUDA plugin, Ray, a server that speaks S3, trackers. They have an environment of their own, and there any skip for a package is a failure.
scale: $(SCALE)/.ready
	$(subst $(BIN),$(SCALE)/bin,$(QUICK)) $(SCALE)/bin/pytest -n $(WORKERS) --dist loadfile --nothing-missing \
		-m "not long and not gpu" $$($(SCALE)/bin/python -m tests.skips)

# The part of them that CI has room for: a Ray, a server that speaks S3, trackers, Kubernetes' schemas. What is compared
# with other people's implementations is held by their stored numbers in `make test`.
services: $(SERVICES)/.ready
	$(subst $(BIN),$(SERVICES)/bin,$(QUICK)) $(SERVICES)/bin/pytest -n $(WORKERS) --dist loadfile --nothing-missing \
		-m "not long and not gpu" $$($(SERVICES)/bin/python -m tests.skips --services)

# The lowest versions that pyproject.toml allows: everything is imported, and a tiny model trained, resumed and sampled.
lowest:
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) -m tests.lowest --pins > $(LOWEST)/pins.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/pins.txt --editable ".[dash]"
	$(LOWEST)/bin/python -m tests.lowest

# Resolve all extras again and write constraints/X.Y.txt for this Python.
constraints: $(BIN)/python
	$(BIN)/python -m constraints

# Pages of the reference and what shell completion knows, from the code.
reference: $(VENV)/.test
	$(BIN)/python -m docs.generate

soak: $(VENV)/.test
	$(BIN)/python -m tests.faults.soak --kills $(N)

prove: $(VENV)/.test
	$(BIN)/python -m tests.prove

check: $(VENV)/.test docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m docs.prose

# The documentation as a site in site/, readable without a server or a network. A link that leads nowhere is an error
# (with --quiet it would not be: warnings are then dropped before --strict counts them).
docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m docs.prose --wrap

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# With the page and the server: whoever has trained a model wants to look at it.
$(VENV)/.base: $(BIN)/python pyproject.toml $(PINNED)
	@echo "installing into $(VENV): a minute or so"
	$(BIN)/$(INSTALL) --editable ".[dash]"
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml $(PINNED)
	$(BIN)/$(INSTALL) --editable ".[test]"
	touch $@ $(VENV)/.base

$(SCALE)/.ready: pyproject.toml $(PINNED)
	@echo "installing into $(SCALE): some minutes"
	$(PYTHON) -m venv $(SCALE)
	$(SCALE)/bin/python -m pip install --quiet --upgrade pip
	$(SCALE)/bin/$(INSTALL) --editable ".[test,test-scale,test-peers]"
	touch $@

$(SERVICES)/.ready: pyproject.toml $(PINNED)
	@echo "installing into $(SERVICES): a minute or two"
	$(PYTHON) -m venv $(SERVICES)
	$(SERVICES)/bin/python -m pip install --quiet --upgrade pip
	$(SERVICES)/bin/$(INSTALL) --editable ".[test,test-scale]"
	touch $@

# The page's tests drive a real browser. Where Debian's cannot be installed they are skipped, and say so.
$(VENV)/.chromium: $(VENV)/.test
	command -v chromium || (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium) \
		&& touch $@ || echo "no Chromium could be installed: the page's tests in a browser are skipped"

clean:
	rm -rf $(VENV) $(SCALE) $(SERVICES) $(LOWEST) site .pytest_cache .mypy_cache .ruff_cache
