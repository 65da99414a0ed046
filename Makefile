# Two commands: `make demo` and `make test`. Each sets up everything it needs under .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The system's pip installs into the environment, so Debian's python3-venv is not needed.
PIP := $(PYTHON) -m pip --python $(BIN)/python --disable-pip-version-check install -c constraints.txt

# make demo TORCH_INDEX=URL takes PyTorch from another index, such as that of its CPU-only wheels. What
# PyTorch needs comes from the usual index, as the other one may lack the versions of constraints.txt.
TORCH_INDEX ?=
TORCH := $(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch torchvision)

.PHONY: demo test test-slow test-extras test-lowest package campaigns learn bench gpu-check check \
	format docs notebooks screenshots clean

demo: $(VENV)/.installed
	$(BIN)/meanshift demo

test: $(VENV)/.installed-dev $(VENV)/.browser
	$(BIN)/pytest -n 2

# Proofs that take many seconds each.
test-slow: $(VENV)/.installed-dev $(VENV)/.browser
	$(BIN)/pytest -n 2 -m 'slow and not extras' --timeout 1200

# What needs optional libraries: timm, ONNX, faiss, the trackers, Hugging Face, lightly.
test-extras: $(VENV)/.installed-extras
	$(BIN)/pytest -n 2 -m extras --timeout 1200

# The lower bounds of pyproject.toml: the oldest version of each direct dependency, in an environment
# of its own. What depends on the versions of libraries is tested; warnings of old ones are no errors.
# Left out: the position of views in a figure, to the pixel, which is another one with an old
# matplotlib, and how much t-SNE maps move between epochs, which is more with numpy 1.26.
LOWEST := .venv-lowest
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/pytest -n 2 -m 'not slow and not campaign' --timeout 1200 -o filterwarnings=default \
	    tests/cli tests/data tests/evaluation tests/models tests/ops tests/runtime tests/training \
	    tests/transforms tests/viz tests/test_api.py tests/test_estimator.py \
	    --deselect tests/viz/test_figures.py::test_views_are_exactly_those_of_training \
	    --deselect tests/viz/test_tsne.py::test_maps_are_aligned_and_as_faithful_as_independent_ones

# The wheel and the source distribution, in dist/; then the tests of what they contain and do.
package: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build
	$(BIN)/pytest -m 'slow or not slow' --timeout 1200 tests/integration/test_package.py

# Random kills and hammering, for minutes; run them after a change of how runs are saved or stopped.
campaigns: $(VENV)/.installed-dev
	$(BIN)/pytest -n 2 -m 'campaign and not extras' --timeout 3600

# What the demo's recipe learns in fixed CPU seconds, with three seeds; fails below its floors.
learn: $(VENV)/.installed
	$(BIN)/python tools/learn.py

# What could not be tested without a GPU: a few minutes on one, and a table to paste into an issue.
gpu-check: $(VENV)/.installed
	$(BIN)/python tools/gpu_check.py

# The speed tables, against libraries that nothing else here needs.
bench: $(VENV)/.installed-extras
	$(BIN)/python -m benchmarks

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documentation site, in build/site: a broken link, a broken anchor or an orphan page is an error.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

# Run the notebooks and store their outputs in them.
notebooks: $(VENV)/.installed-dev
	$(BIN)/python tools/run_notebooks.py

# The screenshots in README and docs, of the demo or of another run (RUN=...).
RUN ?= runs/demo
screenshots: $(VENV)/.installed-dev $(VENV)/.browser
	test -e $(RUN)/report.html || $(BIN)/meanshift demo --out $(RUN)
	$(BIN)/python tools/make_screenshots.py $(RUN)

# The pages are tested in a real browser if there is one or it can be installed; otherwise those
# tests are skipped.
$(VENV)/.browser: | $(BIN)/python
	@if command -v chromium >/dev/null || (test "$$(id -u)" = 0 && apt-get update -qq \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null); then touch $@; \
	else echo "no chromium and no right to install it: the browser tests will be skipped"; fi

$(BIN)/python:
	$(PYTHON) -m venv --without-pip $(VENV)

SIZE := $(if $(TORCH_INDEX),PyTorch comes from $(TORCH_INDEX),PyTorch with CUDA is most of it: 2.7 GB \
	to download and 6 GB on disk on Linux; docs/install.md has a smaller way)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing meanshift with report and explorer into $(VENV). $(SIZE)."
	@echo "pip shows each download, and then unpacks them all without a word, for a minute or more."
	$(TORCH)
	$(PIP) -e '.[explore]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing meanshift and the tools for its tests into $(VENV). $(SIZE)."
	@echo "pip shows each download, and then unpacks them all without a word, for a minute or more."
	$(TORCH)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-extras: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing meanshift with all optional libraries into $(VENV). $(SIZE)."
	@echo "pip shows each download, and then unpacks them all without a word, for a minute or more."
	$(TORCH)
	$(PIP) -e '.[dev,bench,all]'
	touch $@ $(VENV)/.installed-dev $(VENV)/.installed

# uv finds the oldest versions; it reads UV_DEFAULT_INDEX, and not the settings of pip.
$(LOWEST)/.installed: pyproject.toml
	@echo "Installing the oldest version of each dependency into $(LOWEST), 8 GB on disk."
	$(PYTHON) -m venv --without-pip --clear $(LOWEST)
	$(PYTHON) -m pip --python $(LOWEST)/bin/python --disable-pip-version-check install uv
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev,all]'
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
