# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check unit integration docs clean

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): torch and all else. Minutes, once; pip is quiet until it is done."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## a small Llama gets over an exception, a hang and SIGKILL
	$(BIN)/python examples/llama/demo.py

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check  ## everything CI runs
	$(BIN)/pytest

unit: $(STAMP)
	$(BIN)/pytest tests/unit

integration: $(STAMP)
	$(BIN)/pytest tests/integration

docs: $(STAMP)  ## check that every link and code reference in the docs exists
	$(BIN)/python docs/check.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
