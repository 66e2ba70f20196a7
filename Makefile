# `make` lists the targets. Each one creates the environment it needs from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "equilibra needs Python 3.11 or newer, this is %d.%d; set PYTHON=/path/to/python3.11" % v)'
	@echo "installing equilibra into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --only-binary :all: megatron-core psutil \
	  || echo "megatron-core could not be installed: the tests that need it are skipped"
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --only-binary :all: verl tensordict omegaconf codetiming \
	  cloudpickle orjson pyvers || echo "verl could not be installed: the tests that need it are skipped"
	@touch $@

.PHONY: setup
setup: $(READY) ## create .venv and install the package with everything the tests need

.PHONY: run
run: $(READY) ## train a small MoE by reinforcement learning on four ranks, balanced; a few minutes, no GPU
	@$(BIN)/equilibra train

.PHONY: simulate
simulate: $(READY) ## simulate a synthetic RL step under every planner and write report.html
	@$(BIN)/equilibra simulate --nodes 4 --report report.html --overwrite

.PHONY: lint
lint: $(READY) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: chromium
chromium: # tests of the report open it in this browser; where it cannot be installed they are skipped and say so
	@test -x /usr/bin/chromium || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo "installing chromium for the tests of the report" \
	  && apt-get update -qq >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; } \
	  || echo "there is no /usr/bin/chromium: the tests that open the report in a browser are skipped"

.PHONY: test
test: lint chromium ## everything CI does
	$(BIN)/pytest -n 2 -m 'not slow'

.PHONY: test-all
test-all: lint chromium ## the same and the slow proofs
	$(BIN)/pytest -n 2

.PHONY: bench
bench: $(READY) ## measure everything into benchmarks/results (EQUILIBRA_TRACES: real routing)
	$(BIN)/equilibra bench planner --output benchmarks/results
	$(BIN)/equilibra bench paper --output benchmarks/results
	$(BIN)/equilibra bench runtime --output benchmarks/results
	$(BIN)/equilibra bench train --output benchmarks/results
	$(BIN)/python benchmarks/training_runs.py benchmarks/results
	$(BIN)/python -m benchmarks.megatron_steps benchmarks/results

.PHONY: bench-gpu
bench-gpu: $(READY) ## measure expert layers on a GPU into benchmarks/results (EQUILIBRA_TRACES: real routing)
	$(BIN)/equilibra bench gpu --output benchmarks/results

.PHONY: clean
clean: ## remove the environment and caches
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
