# Two commands matter: `make demo` and `make test`. Both build the environment they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint format clean

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "haiku-posteriors needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python demo.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n auto --maxprocesses=8 --dist=loadfile

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow -n auto --maxprocesses=8 --dist=loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.installed-dev
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
