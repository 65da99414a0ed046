# Two commands: `make demo` and `make test`. Each sets up all that it needs under .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip of the system installs into the environment, so Debian's python3-venv is not needed.
PIP = $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test test-slow check format clean

demo: $(VENV)/.installed
	$(BIN)/meanshift demo

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
