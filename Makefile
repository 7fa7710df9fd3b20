# Everything a developer runs. `make demo` and `make test` do all their own set-up; with nvcc they build for the GPU too.
# `make docs` builds the site of docs/ into build/docs: any broken link is an error.
#
# PYTHON   the interpreter that .venv is made of (3.11 or later); of gpu-check, gpu-sanitize and bench the interpreter
#          itself, as it is: they install nothing
# STEP     one step of gpu-check: tests, sanitize, conv, gemm, voxel or overhead; all of them without it
# CHECK    more arguments of gpu-check: --scene lidar=cloud.npz, --anchors peers.json, --peers torch flex_gemm
#
# simt runs the CUDA kernels on the CPU (tests/simt/README.md), which it compiles for that: the kernels' tests in both
# families; simt-paths one small case of every kernel path.

PYTHON ?= python3
STEP ?= all
CHECK ?=

VENV := .venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard csrc/*.[ch] kernels/*.[ch] kernels/*/*.[ch] kernels/cuda/*.cu kernels/cuda/*.cuh \
    tests/simt/*.h tests/simt/*.cpp tests/simt/*.cu tests/simt/include/cub/*/*.cuh)

# Whether the module that is there is of these sources: 0 yes, 1 build it, a message where building would lose the GPU.
define CHECK_MODULE
import os, sys
try:
    import flexgemm
except ImportError:
    sys.exit(1)
import setup
info = flexgemm.build_info()
if info["source_sha256"] == setup.source_sha256():
    sys.exit(0)
if info["cuda"] and os.environ.get("FLEXGEMM_CUDA") != "0" and setup.find_toolkit() is None:
    print(f"flexgemm._C has CUDA kernels of other sources ({info['source_sha256'][:12]}), and there is no nvcc here to "
          "build these: bring a module built from this tree, or replace it by a CPU-only one with FLEXGEMM_CUDA=0.",
          file=sys.stderr)
    sys.exit(2)
sys.exit(1)
endef
export CHECK_MODULE

.DELETE_ON_ERROR:
.PHONY: demo test docs simt simt-paths build bench gpu-check gpu-sanitize module format lint clean

demo: build
	$(BIN)/python -m flexgemm demo

# Tests run in as many processes as there are cores, but in no more than have the memory for it.
SIDE_BY_SIDE := -n auto --maxprocesses 8 --dist worksteal

# Waiting threads sleep: spinning ones take the cores from whatever else runs, and tests are many short parallel regions.
test: build $(VENV)/dev.stamp
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

docs: build $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --quiet

# pytest itself, not python -m pytest: that would find the package of the working directory.
EMULATED := PYTHONPATH=build/simt:. OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -q $(SIDE_BY_SIDE) -m "not large"

simt: simt-paths
	$(EMULATED) -m "gpu and not large" -k "not n20000" --ignore tests/simt --ignore tests/test_build.py
	FLEXGEMM_ARCH=sm80 $(EMULATED) -m "gpu and not large" -k "not n20000" --ignore tests/simt --ignore tests/test_build.py

simt-paths: $(VENV)/dev.stamp
	$(BIN)/python tests/simt/build.py
	$(EMULATED) tests/simt tests/test_devices.py
	FLEXGEMM_SIMT_SMS=2 FLEXGEMM_SIMT_SEED=1 $(EMULATED) tests/simt -k path
	FLEXGEMM_ARCH=sm89 $(EMULATED) tests/simt -k "path and float8"
	FLEXGEMM_ARCH=sm80 $(EMULATED) tests/simt -k path

# The build itself knows what is stale; the editable install is made once.
build: $(VENV)/demo.stamp
	$(BIN)/python setup.py -q build_ext --inplace
	@test -e $(VENV)/editable.stamp || $(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@touch $(VENV)/editable.stamp

bench: module
	$(PYTHON) -m benchmarks

gpu-check: module
	$(PYTHON) -m benchmarks.gpu_check --step $(STEP) $(CHECK)

gpu-sanitize: module
	$(PYTHON) -m benchmarks.gpu_check --step sanitize

# For the interpreter as it is: builds unless the module there already is of these sources, as a carried binary may be.
module:
	@$(PYTHON) -c "$$CHECK_MODULE"; status=$$?; test $$status -ne 2 || exit 2; \
	test $$status -eq 0 || $(PYTHON) setup.py -q build_ext --inplace

format: $(VENV)/dev.stamp
	$(BIN)/clang-format -i $(C_SOURCES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(VENV)/dev.stamp
	$(BIN)/clang-format --dry-run -Werror $(C_SOURCES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# .venv stays: it is the slow part, and holds nothing that was built here.
clean:
	rm -rf build dist *.egg-info flexgemm/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +
	rm -f demo.png terrain_unet.png $(VENV)/editable.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("flexgemm needs Python 3.11 or later: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/%.stamp: requirements-%.txt requirements-demo.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@
