# Every target sets up what it needs: a virtual environment in .venv/, the demonstration model and
# the compilers' caches in .cache/. Repeated runs start at once.
#
#   make demo    text and speed of a small model, unmodified and compiled
#   make test    the whole test suite            (make test ARGS="-k pages" for a part)
#   make check   formatting, lint, types, import directions, file sizes
#   make check-triton-3.6   machine code of GPU kernels, as an older Triton compiles them
#   make bench   decoding speed of a whole model  (make bench ARGS="--contexts 1024 8192")
#   make golden  rewrite the golden files, to be read as a diff
#   make model   only fetch the demonstration model
#   make clean   remove .venv/ and .cache/

PYTHON ?=
VENV ?= .venv
ARGS ?=
# Test processes. One thread each: more threads than cores make every one of them slower.
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
CXX ?= g++

CACHE := $(CURDIR)/.cache
BIN := $(VENV)/bin
MODEL := $(CACHE)/models/SmolLM2-135M-Instruct/model.safetensors

# Compiled code is kept between runs; nothing is looked up on a hub.
export TORCHINDUCTOR_CACHE_DIR ?= $(CACHE)/inductor
export KVCOMPILE_CACHE_DIR ?= $(CACHE)/kernels
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export CXX

.PHONY: demo test check check-triton-3.6 bench golden model setup clean
.DELETE_ON_ERROR:

demo: setup model
	$(BIN)/python -m examples.demo $(ARGS)

test: setup model
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_sizes.py

# The oldest Triton that kernels are held to; what `make test` uses is in requirements/dev.txt.
OLD_TRITON := $(CACHE)/triton-3.6.0

check-triton-3.6: setup $(OLD_TRITON)/.installed
	PYTHONPATH=$(OLD_TRITON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) \
	  tests/codegen/test_machine_code.py $(ARGS)

$(OLD_TRITON)/.installed: | $(VENV)/.dev
	@echo "installing Triton 3.6.0 in $(OLD_TRITON)"
	@$(BIN)/python -m pip install --quiet --no-deps --target $(OLD_TRITON) triton==3.6.0
	@touch $@

bench: setup model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -x -n $(JOBS) -m "not slow" tests/end_to_end
	$(BIN)/python -m benchmarks.decode $(ARGS)

golden: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m golden --update-golden $(ARGS)
	git status --short -- '*.expected'

model: $(MODEL)

$(MODEL): tools/fetch_model.py | $(VENV)/.dev
	@$(BIN)/python tools/fetch_model.py
	@touch $@

setup: $(VENV)/.dev
	@command -v $(firstword $(CXX)) >/dev/null || { \
	  echo "No C++ compiler: install g++, or set CXX=/path/to/compiler." >&2; exit 1; }

# The stamps carry the state of .venv/: made, torch in it, everything in it.
$(VENV)/.made: tools/find_python
	@python=$$(sh tools/find_python $(PYTHON)) && \
	  echo "virtual environment of $$python in $(VENV)" && "$$python" -m venv --clear $(VENV)
	@touch $@

# Before everything else, so that nothing below pulls a second, larger torch.
$(VENV)/.torch: requirements/torch.txt $(VENV)/.made
	@echo "installing PyTorch"
	@$(BIN)/python -m pip install --quiet -r requirements/torch.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt pyproject.toml $(VENV)/.torch
	@echo "installing what kvcompile and its tests need"
	@$(BIN)/python -m pip install --quiet -r requirements/torch.txt -r requirements/dev.txt
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

clean:
	rm -rf $(VENV) .cache build
