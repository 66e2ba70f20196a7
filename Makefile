# `make` lists the targets. Each one creates the environment it needs from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
TORCH ?=# cpu: PyTorch without CUDA, from the index that PyTorch documents for it
PYTHONS := 3.11 3.12 3.13
MEGATRONS := 0.16.1 0.18.2 0.19.2
GPU_PYTHON ?= 3.12
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS_READY := $(VENV)/.ready-tests
DOCS_READY := $(VENV)/.ready-docs
STACKS_VENV ?= .venv-stacks
STACKS_READY := $(STACKS_VENV)/.ready
STACKS_INSTALL := $(STACKS_VENV)/bin/pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
CHECKED := $(wildcard tests/unit/core tests/unit/cost tests/unit/events tests/unit/trace tests/unit/simulate tests/unit/report tests/golden tests/unit/rl/test_loss.py tests/unit/rl/test_gae.py tests/unit/plan/test_plan_[a-q]*.py)
# a file's tests share fixtures, so a file stays with one of the two processes; long files stand first
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
OTHER_ARITHMETIC := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

.PHONY: notice
notice: # what an installation costs, said before it is spent
ifeq ($(TORCH),cpu)
	@echo "installing equilibra into $(VENV) with PyTorch for CPUs: 0.4 GB to download"
else
	@echo "installing equilibra into $(VENV) with PyTorch for CUDA: 2.9 GB to download, about 6 GB on disk, several minutes"
	@ls /dev/nvidia* >/dev/null 2>&1 || command -v nvidia-smi >/dev/null \
	  || echo "no GPU was found: TORCH=cpu (make run TORCH=cpu) installs PyTorch for CPUs instead, 0.4 GB to download"
endif

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "equilibra needs Python 3.11 or newer, this is %d.%d; set PYTHON=/path/to/python3.11" % v)'
	@$(MAKE) --no-print-directory notice
	@$(PYTHON) -m venv $(VENV)
ifneq ($(TORCH),)
	@$(INSTALL) --no-deps --index-url https://download.pytorch.org/whl/$(TORCH) torch
endif
	@$(INSTALL) --editable '.[train]'
	@touch $@

$(TESTS_READY): $(READY) frameworks.txt
	@echo "installing what the tests need beside it"
	@$(INSTALL) --editable '.[dev]'
	@$(INSTALL) --no-deps --only-binary :all: --requirement frameworks.txt \
	  || echo "Megatron-Core and verl could not be installed: the tests that need them are skipped"
	@touch $@

$(DOCS_READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what the documentation needs: no PyTorch, 0.1 GB to download"
	@$(INSTALL) --editable '.[docs]'
	@touch $@

# vLLM for CPUs brings builds of torchvision, torchaudio and torchcodec for another torch: with them, transformers
# cannot be imported
$(STACKS_READY): tests/stacks/requirements.txt tests/stacks/without_dependencies.txt
	@echo "installing verl, Ray, vLLM and Megatron-Core for CPUs into $(STACKS_VENV): about 4 GB on disk, several minutes"
	@$(PYTHON) -m venv $(STACKS_VENV)
	@$(STACKS_INSTALL) --requirement tests/stacks/requirements.txt
	@$(STACKS_VENV)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(STACKS_INSTALL) --no-deps --requirement tests/stacks/without_dependencies.txt
	@$(STACKS_VENV)/bin/python -c 'import ray, vllm'
	@touch $@

.PHONY: docs
docs: $(DOCS_READY) ## build the documentation into build/site, with every link checked; open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@$(BIN)/python .ci/check_site.py build/site

.PHONY: setup
setup: $(TESTS_READY) ## create .venv and install the package with everything the tests need

.PHONY: run
run: $(READY) ## train a small MoE by reinforcement learning on four ranks, balanced; a few minutes, no GPU (TORCH=cpu: without CUDA)
	@$(BIN)/equilibra train

.PHONY: simulate
simulate: $(READY) ## simulate a synthetic RL step under every planner and write report.html
	@$(BIN)/equilibra simulate --nodes 4 --report report.html --overwrite

.PHONY: lint
lint: $(TESTS_READY) ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: warm
warm: $(TESTS_READY) # compile the kernels once: two pytest processes would compile the same ones beside each other
	@$(BIN)/python .ci/warm.py

.PHONY: resolve
resolve: $(TESTS_READY) ## check that the public index has what constraints.txt pins, for every supported Python
	$(BIN)/python .ci/resolve.py $(PYTHONS)

.PHONY: chromium
chromium: # tests of the report open it in this browser; where it cannot be installed they are skipped and say so
	@test -x /usr/bin/chromium || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	  && echo "installing chromium for the tests of the report" \
	  && apt-get update -qq >/dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; } \
	  || echo "there is no /usr/bin/chromium: the tests that open the report in a browser are skipped"

.PHONY: check
check: $(TESTS_READY) ## lint and the tests that start no processes, in about 90 seconds on two cores; for every save
	@$(MAKE) --no-print-directory -j 2 --output-sync lint warm
	$(PYTEST) -q -m 'not slow' $(CHECKED)

.PHONY: test
test: $(TESTS_READY) $(DOCS_READY) chromium ## everything CI does
	@$(MAKE) --no-print-directory -j 2 --output-sync warm lint resolve docs
	$(PYTEST) -m 'not slow' --durations 20
	@$(MAKE) --no-print-directory test-arithmetic

.PHONY: test-arithmetic
test-arithmetic: $(TESTS_READY) ## the tests that compare floating-point results, as a CPU without AVX would round
	$(OTHER_ARITHMETIC) $(PYTEST) -m 'arithmetic and not slow' $$(grep -rl 'mark\.arithmetic' tests --include 'test_*.py')

.PHONY: test-pythons
test-pythons: ## the tests under every supported Python that is found, each in an environment of its own
	@missing=; for version in $(PYTHONS); do \
	  for python in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python ''; do \
	    command -v "$$python" >/dev/null && "$$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "'$$version'")' 2>/dev/null && break; done; \
	  test -n "$$python" || { missing="$$missing $$version"; continue; }; \
	  echo "testing with $$python in .venv-$$version"; \
	  $(MAKE) --no-print-directory test-here PYTHON="$$python" VENV=.venv-$$version || exit 1; done; \
	  test -z "$$missing" || echo "not tested, as they were not found: Python$$missing"

.PHONY: test-here
test-here: $(TESTS_READY)
	$(PYTEST) -m 'not slow'

.PHONY: test-megatron
test-megatron: $(TESTS_READY) ## the tests of the Megatron integration with every supported version of Megatron-Core
	@for version in $(MEGATRONS); do folder=build/megatron-core-$$version; echo "testing with megatron-core $$version"; \
	  test -d $$folder || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	    --ignore-requires-python --target $$folder megatron-core==$$version || exit 1; \
	  PYTHONPATH=$$folder $(PYTEST) -q -m 'not slow' tests/megatron_core || exit 1; done

.PHONY: test-all
test-all: lint warm resolve docs chromium ## the same, the slow proofs, every supported Python and Megatron-Core, and whole programs
	$(PYTEST)
	@$(MAKE) --no-print-directory test-arithmetic
	@$(MAKE) --no-print-directory test-megatron
	@$(MAKE) --no-print-directory test-pythons
	@$(MAKE) --no-print-directory test-stacks

.PHONY: stacks
stacks: $(STACKS_READY) ## create .venv-stacks with verl, Ray, vLLM and Megatron-Core for CPUs (STACKS_VENV: another folder)

.PHONY: test-stacks
test-stacks: ## whole programs: verl's trainer under Ray with real vLLM, plain and balanced; about ten minutes on two free cores
	@if $(MAKE) --no-print-directory stacks; then PYTHONPATH=$(CURDIR)/src $(STACKS_VENV)/bin/python -m pytest tests/stacks; \
	  else echo "tests/stacks skipped: verl, Ray, vLLM or Megatron-Core could not be installed into $(STACKS_VENV)"; fi

.PHONY: test-gpu
test-gpu: $(READY) ## tests that need a GPU: four processes share it, over NCCL and gloo; about ten minutes
	PYTHON=$(BIN)/python tests/gpu/run.sh -m 'not slow'

.PHONY: bench
bench: $(TESTS_READY) ## measure everything into benchmarks/results (EQUILIBRA_TRACES: real routing)
	$(BIN)/equilibra bench planner --output benchmarks/results
	$(BIN)/equilibra bench paper --output benchmarks/results
	$(BIN)/equilibra bench runtime --output benchmarks/results
	$(BIN)/equilibra bench train --output benchmarks/results
	$(BIN)/python benchmarks/training_runs.py benchmarks/results
	$(BIN)/python -m benchmarks.megatron_steps benchmarks/results

.PHONY: bench-gpu
bench-gpu: $(TESTS_READY) ## measure expert layers on a GPU into benchmarks/results (EQUILIBRA_TRACES: real routing)
	$(BIN)/equilibra bench gpu --output benchmarks/results

.PHONY: megatron-gpu
megatron-gpu: ## unpack megatron-core for the Python of a GPU machine (GPU_PYTHON) into build/megatron-gpu, 12 MB
	@rm -rf build/megatron-gpu
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --no-compile \
	  --python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  --platform manylinux2010_x86_64 --target build/megatron-gpu megatron-core==$(firstword $(MEGATRONS)) psutil einops

.PHONY: bench-megatron-gpu
bench-megatron-gpu: ## measure Megatron on a GPU that four processes share into benchmarks/results; run megatron-gpu before
	benchmarks/megatron_gpu/run.sh --output benchmarks/results

.PHONY: clean
clean: ## remove the environments and caches
	rm -rf $(VENV) $(PYTHONS:%=.venv-%) $(STACKS_VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
