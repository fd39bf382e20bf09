# Everything runs in .venv, which the first target that needs it creates. `make help` lists the targets.
# Needs python3 (>= 3.10), a C++ compiler and make; cmake, ninja and all else come from pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Kept by `pip install -e .`; configured once, so that a rebuild compiles only what changed.
BUILD_TREE := build/editable
SANITIZE_TREE := build/sanitize
SHAPES ?= 500
SEED ?= 0
FUZZ_SECONDS ?= 600
# TORCH_BACKEND=cpu: torch from PyTorch's own CPU builds, which uv knows. Without it pip decides, and may bring CUDA's.
TORCH_BACKEND ?=
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
# Many tests wait for processes, so that more workers than cores pay. A worker takes whole files.
WORKERS ?= 3
BENCH_ARGS ?=
SWEEP_ARGS ?=
WHEEL_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install build demo docs test sanitize soak fuzz models lint format bench wheel wheel-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## create .venv, with cputrain (editable) and all that development needs

# --no-build-isolation: the build uses .venv's own tools, and needs neither a second download nor torch.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("cputrain needs Python 3.10 or later, found %d.%d: set PYTHON=python3.x" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_BACKEND),$(PIP) install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt --torch-backend $(TORCH_BACKEND) torch)
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

docs: $(INSTALLED) ## build the documentation's site into build/docs; its pages load nothing from elsewhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: build ## run all tests (PYTEST_ARGS="-k dropout" for some, WORKERS=0 for one after the other)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

soak: build ## what takes hours: 10,000 shapes under sanitizers, every model type, older transformers, faults, torch's own tests, wheels
	$(MAKE) sanitize SHAPES=10000
	$(BIN)/python -m tests.sweep --all $(SWEEP_ARGS)
	$(BIN)/python -m tests.integrations.earlier 4.48 -m pytest tests/parity
	$(BIN)/python -m tests.integrations.earlier 4.57 -m pytest tests/parity
	$(BIN)/python -m tests.distributed.strangers --runs 50
	$(BIN)/python benchmarks/auto_under_load.py
	$(BIN)/python benchmarks/plan_accuracy.py --cgroup
	$(BIN)/python -m tests.launch.lost_output --times 20
	$(BIN)/python -m tests.distributed.fault_matrix --seed $(SEED)
	$(BIN)/python -m tests.distributed.restarts --restarts 100
	$(BIN)/python -m tests.checkpoints.faults --times 1000
	$(BIN)/python -m tests.checkpoints.kills --times 100
	$(BIN)/python -m tests.checkpoints.stops --times 30
	$(BIN)/python -m tests.checkpoints.requeues --times 10 --time-limit
	PYTHONPATH=tests $(BIN)/python -m tests.checkpoints.lost_pods --times 10
	$(BIN)/python -m tests.checkpoints.lost_hosts --times 10
	$(BIN)/python -m tests.distributed.torchs_suite --ranks 2 3 4
	$(MAKE) wheel-test

fuzz: build ## give every parser nonsense, guided by atheris (FUZZ_SECONDS=600 for each)
	$(BIN)/python -c "import atheris" 2>/dev/null || $(PIP) install --quiet -c constraints.txt atheris
	$(BIN)/python -m tests.fuzz.under_atheris --seconds $(FUZZ_SECONDS)

models: build ## write docs/models.md: what is replaced in each model type
	$(BIN)/python -m tests.sweep.models_page

sanitize: $(INSTALLED) ## run the kernels under sanitizers (SHAPES=10000 SEED=1 for more shapes, or others)
	test -f $(SANITIZE_TREE)/CMakeCache.txt || $(BIN)/cmake -S . -B $(SANITIZE_TREE) -G Ninja \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCPUTRAIN_SANITIZE=ON
	$(BIN)/cmake --build $(SANITIZE_TREE) --target sanitize_kernels sanitize_collectives
	@export OMP_WAIT_POLICY=passive; cd $(SANITIZE_TREE)/tests/native; half=$$(($(SHAPES) / 2)); \
	./sanitize_collectives $$(($(SHAPES) / 10)) $(SEED) & collectives=$$!; \
	./sanitize_kernels $$half $(SEED) & first=$$!; \
	./sanitize_kernels $$(($(SHAPES) - half)) $(SEED) $$half; second=$$?; \
	wait $$first && wait $$collectives && exit $$second

lint: $(INSTALLED) ## check style and types of Python and C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc tests/native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(INSTALLED) ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests/native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bench: build ## measure kernels and training against stock (BENCH_ARGS="--help" for the settings)
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/training.py $(BENCH_ARGS)

wheel: $(INSTALLED) ## build both wheels (Linux x86-64; py3-none-any without kernels) and the sdist into dist/, checked
	rm -rf dist build/wheel && mkdir -p dist build/wheel
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/wheel/cputrain-*.whl
	CPUTRAIN_WITHOUT_KERNELS=1 $(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	$(BIN)/twine check --strict dist/*
	@ls -l dist

wheel-test: wheel ## use what `make wheel` made: in Debian 11 and 12 (debootstrap, as root), and compiled from the sdist
	$(BIN)/python -m tests.wheels $(WHEEL_ARGS)

clean: ## remove all that was built; .venv stays
	rm -rf build dist src/cputrain/lib .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
