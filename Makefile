# `make run` sets up what running needs, `make test` what testing needs as well: a virtual environment, the pinned dependencies, this package.
PYTHON ?= python3
VENV ?= .venv
RECIPE ?= specs/recipes/mini.yaml
AT_ONCE ?= 2
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-for-tests
DOCS_READY := $(VENV)/.ready-for-docs
# The oldest release of transformers that opens exported models; LEAST_TRANSFORMERS of specs/hugging_face.py.
OLDEST := $(abspath $(VENV)-transformers-4.56)
LATEST := $(VENV)-latest
LATEST_INSTALL = $(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check
# On a terminal, pip shows what it downloads and installs.
INSTALL = $(BIN)/python -m pip install $$([ -t 2 ] || echo --quiet) --constraint constraints.txt --editable

.PHONY: setup run lint test test-all test-latest gpu-check docs numerics oldest-transformers clean

setup: $(READY)

$(BIN)/pip:
	@[ "$$(uname -s)" = Linux ] || { echo "Apertus runs on Linux (x86-64, aarch64): there is no triton for $$(uname -s)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { echo "Python 3.11, 3.12 or 3.13 is needed; name it with PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip

$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing the pinned dependencies into $(VENV): 2.6 GB with a CPU build of torch, 5.6 GB with the CUDA build; a few minutes."
	@$(INSTALL) '.[examples]'
	@touch $(READY)

$(TEST_READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing the pinned dependencies and what the tests need, 0.7 GB, into $(VENV): 3.3 GB with a CPU build of torch, 6.3 GB with the CUDA build; a few minutes."
	@$(INSTALL) '.[dev]'
	@touch $(READY) $(TEST_READY)

$(DOCS_READY): $(READY)
	@echo "Installing what the documentation site needs."
	@$(INSTALL) '.[docs]'
	@touch $(DOCS_READY)

run: $(READY)
	@$(BIN)/apertus run $(RECIPE)

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -m "not slow" -n $(AT_ONCE)

# Some of these tests wait, so three processes keep two cores busy.
test-all: AT_ONCE = 3
test-all: export OLDEST_TRANSFORMERS_PYTHON = $(OLDEST)/bin/python
test-all: lint docs $(OLDEST)/.ready
	$(BIN)/python -m pytest --crashes -n $(AT_ONCE) -o faulthandler_timeout=4000 --junitxml=test-all.xml; status=$$?; $(BIN)/python -m tools.record test-all.xml > docs/test_all.md; exit $$status

oldest-transformers: $(OLDEST)/.ready
	@echo "Tests find it with OLDEST_TRANSFORMERS_PYTHON=$(OLDEST)/bin/python"

$(OLDEST)/.ready: constraints.txt
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== constraints.txt)" "transformers==4.56.*" jinja2 numpy
	@touch $@

gpu-check: $(TEST_READY)
	@TESTS_ON=gpu $(BIN)/python -m pytest tests/gpu -o junit_family=xunit1 --junitxml=gpu-check.xml; status=$$?; $(BIN)/python -m tools.gpu_check gpu-check.xml docs/gpu_check.md; exit $$status

docs: $(DOCS_READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "The site is in site/; open site/index.html, or serve it for the search: $(BIN)/python -m http.server -d site"

numerics: $(TEST_READY)
	$(BIN)/python -m pytest --numerics tests/specs tests/apertus_model

# Made anew each time, since what is newest changes. The pins are lower bounds, or pip would try older and older
# releases of what others bound. Tests that fail are listed after the versions.
test-latest:
	@$(PYTHON) -m venv --clear $(LATEST)
	@$(LATEST_INSTALL) --upgrade pip
	@$(PYTHON) -m tools.latest requirements > $(LATEST)/requirements.txt
	@sed 's/==/>=/' constraints.txt > $(LATEST)/constraints.txt
	@echo "Installing the newest dependencies into $(LATEST): 6.3 GB with the CUDA build of torch; a few minutes."
	@$(LATEST_INSTALL) --constraint $(LATEST)/constraints.txt --requirement $(LATEST)/requirements.txt
	@$(LATEST_INSTALL) --no-deps --editable .
	@echo "Not the pinned versions:"; $(LATEST)/bin/python -m tools.latest differences
	$(LATEST)/bin/python -m pytest -m "not slow" -n $(AT_ONCE)

clean:
	rm -rf $(VENV) $(OLDEST) $(LATEST) *.egg-info
