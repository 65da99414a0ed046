# Two commands: `make demo` and `make test`. Each sets up all that it needs under .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip of the system installs into the environment, so Debian's python3-venv is not needed.
PIP = $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test test-slow bench check format screenshots clean

demo: $(VENV)/.installed
	$(BIN)/meanshift demo

test: $(VENV)/.installed-dev $(VENV)/.browser
	$(BIN)/pytest -n 2

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow

# The speed figures, against libraries that nothing else here needs.
bench: $(VENV)/.installed-bench
	$(BIN)/meanshift bench

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The screenshots in README and docs, of the demo or of another run (RUN=...).
RUN ?= runs/demo
screenshots: $(VENV)/.installed-dev $(VENV)/.browser
	test -e $(RUN)/report.html || $(BIN)/meanshift demo --out $(RUN)
	$(BIN)/python tools/make_screenshots.py $(RUN)

# The pages are tested in a real browser where there is one or it can be had; else the tests say so.
$(VENV)/.browser: | $(BIN)/python
	@if command -v chromium >/dev/null || (test "$$(id -u)" = 0 && apt-get update -qq \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null); then touch $@; \
	else echo "no chromium and no right to install it: the browser tests will be skipped"; fi

$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev,bench]'
	touch $@ $(VENV)/.installed-dev $(VENV)/.installed

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
