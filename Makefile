# The two commands of the README: `make serve` and `make test`. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-all browser lint clean

setup: $(STAMP)

# torch is named with its exact version first: that is what selects the small CPU build where one is at hand.
$(STAMP): pyproject.toml requirements.txt
	@echo "Installing ddtree and what it needs into $(VENV): two to four minutes, about 1.5 GB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

serve: setup
	$(BIN)/ddtree serve

test: setup
	$(BIN)/ddtree fetch smollm2
	$(BIN)/python -m tests.qwen3_files
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not long and not gpu"

test-all: setup
	$(BIN)/ddtree fetch smollm2
	$(BIN)/python -m tests.qwen3_files
	$(BIN)/python -m pytest -q -m "not gpu"

# A headless Chromium, without which the tests of the chat page are skipped; wants root and apt, and does nothing elsewhere.
browser:
	@.ci/browser

lint: setup
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
