# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.
# Needs python3 (>= 3.10), a C++ compiler and make; cmake, ninja and all else come from pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Kept by `pip install -e .`; configured once, so that a rebuild compiles only what changed.
BUILD_TREE := build/editable
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
BENCH_ARGS ?=
SWEEP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install build demo test soak models lint format bench wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## create .venv, with cputrain (editable) and all that development needs

# --no-build-isolation: the build uses .venv's own tools, and needs neither a second download nor torch.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("cputrain needs Python 3.10 or later, found %d.%d: set PYTHON=python3.x" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt "scikit-build-core>=0.11" cmake ninja
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e ".[hf,dev]"
	touch $@

build: $(INSTALLED) ## compile the native library after an edit of csrc/
	test -f $(BUILD_TREE)/CMakeCache.txt || $(PIP) install --quiet --no-build-isolation --no-deps -e .
	$(BIN)/cmake --build $(BUILD_TREE)
	rm -f src/cputrain/lib/*.so # a new file: written over, the old one would end whatever process uses it
	$(BIN)/cmake --install $(BUILD_TREE)

demo: build ## train a small question-answering model, stock and optimised side by side (5 minutes)
	$(BIN)/python examples/demo/run_demo.py

test: build ## run all tests (PYTEST_ARGS="-k dropout" for some)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: build ## sweep every model type of transformers against stock (an hour; SWEEP_ARGS="--quick")
	$(BIN)/python -m tests.sweep --all $(SWEEP_ARGS)

models: build ## write docs/models.md: what is replaced in each model type
	$(BIN)/python -m tests.sweep.models_page

lint: $(INSTALLED) ## check style and types of Python and C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(INSTALLED) ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bench: build ## measure kernels and training against stock (BENCH_ARGS="--help" for the settings)
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/training.py $(BENCH_ARGS)

wheel: $(INSTALLED) ## build dist/cputrain-*-py3-none-<platform>.whl
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean: ## remove all that was built; .venv stays
	rm -rf build dist src/cputrain/lib .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
