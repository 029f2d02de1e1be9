# Everything sets itself up in .venv: `make demo` and `make test` work on a machine that has Python 3.11 or newer, a C++
# compiler and make. `make gpu-check` needs no network; it uses the packages of the interpreter itself.

PYTHON ?= python3
PYTEST_ARGS ?=
STRESS_SECONDS ?= 60
FUZZ_EXAMPLES ?= 2000
SANITIZERS ?= address thread
CUDA_ARCHITECTURE ?= sm_90

VENV := .venv
BIN := $(VENV)/bin
# A test that hangs ends the run, with every thread's traceback.
PYTEST := $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true
NATIVE := CMakeLists.txt $(shell find _native -type f)
SOURCES := $(shell find aiocuda_copy -name '*.py')
LINTED := aiocuda_copy tests $(wildcard examples)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2
# Container images like to set it. Without bytecode each of the hundred processes that tests start compiles the package
# anew, and those of pytest rewrite every assertion of its plugins as well, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
# One pip at a time.
.NOTPARALLEL:
.PHONY: ptx scatter-bench demo bench info test check lint types stubs docs gpu-check stress fuzz sanitize clean

demo: $(VENV)/.built
	$(BIN)/python -m aiocuda_copy demo

info: $(VENV)/.built
	$(BIN)/python -m aiocuda_copy info

bench: $(VENV)/.built
	$(BIN)/python -m aiocuda_copy bench

# In two processes, a file of tests in one of them: the emulated driver is a process's own. Those with the most tests
# first, as xdist would have them, are not those that take longest.
test: $(VENV)/.built $(VENV)/.test
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: lint types stubs

lint: $(VENV)/.check
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	PATH=$(CURDIR)/$(BIN):$$PATH cython-lint _native  # which runs pycodestyle by name

# The plugin and the backends are typed against pytest and trio.
types: $(VENV)/.built $(VENV)/.check $(VENV)/.test
	$(BIN)/mypy

stubs: $(VENV)/.built $(VENV)/.check $(VENV)/.test
	$(BIN)/python -m mypy.stubtest --allowlist .ci/stubtest.allowlist aiocuda_copy._native

docs: $(VENV)/.built $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

stress: $(VENV)/.built $(VENV)/.test
	STRESS_SECONDS=$(STRESS_SECONDS) $(PYTEST) -m stress $(PYTEST_ARGS)

fuzz: $(VENV)/.built $(VENV)/.test
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTEST) -m hypothesis --hypothesis-profile=fuzz $(PYTEST_ARGS)

# PYTHONSAFEPATH keeps the source tree, which has no native module in it, from shadowing the installed package, in the
# processes that tests start as well.
gpu-check: build/gpu-site/.built
	PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/gpu-site \
		$(PYTHON) -m pytest --driver=real -m "not stress and not emulated_only" $(PYTEST_ARGS)

build/gpu-site/.built: $(NATIVE) $(SOURCES) pyproject.toml
	rm -rf build/gpu-site
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index --target build/gpu-site .
	touch $@

sanitize: $(SANITIZERS:%=sanitize-%)

sanitize-%: $(VENV)/.built $(VENV)/.test
	.ci/sanitize $* $(PYTEST_ARGS)

# The venv's own pip may be older than 25.1, which is the first with --group.
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.build $(VENV)/.test $(VENV)/.check $(VENV)/.docs: $(VENV)/.%: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --group $*
	touch $@

# Without build isolation CMake's cache outlives the call, so that a change to one file compiles one file.
$(VENV)/.built: $(VENV)/.build $(NATIVE) pyproject.toml
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable .
	touch $@

# These two need nvcc, and only whoever changes the kernel needs them.
ptx:
	.ci/ptx

scatter-bench: build/scatter_bench

build/scatter_bench: _native/bench/scatter_bench.cu _native/scatter.cu
	mkdir -p build
	nvcc -O3 -std=c++17 -arch=$(CUDA_ARCHITECTURE) -o $@ $<

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
