# The two commands of the README: `make serve` and `make test`. Both install what they need first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG := .sglang
# The npm packages openai and @anthropic-ai/sdk (53 MB, 7 s); without them their test is skipped, or fails where CI is set.
NPM_CLIENTS := npm install --prefix tests/server/npm --no-package-lock --ignore-scripts --no-audit --no-fund --loglevel=error || \
	echo "WARNING: the npm clients could not be installed."

.PHONY: setup serve test test-all test-clients sglang test-sglang browser lint clean

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
	$(NPM_CLIENTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not long and not gpu"

test-all: setup
	$(BIN)/ddtree fetch smollm2
	$(BIN)/python -m tests.qwen3_files
	$(NPM_CLIENTS)
	$(BIN)/python -m pytest -q -m "not gpu"

# Every client, also those that are too large for `make setup` (LiteLLM, 200 MB).
test-clients: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/clients.txt -c requirements.txt
	$(NPM_CLIENTS)
	TEST_CLIENTS=1 $(BIN)/python -m pytest -q tests/server/test_clients.py tests/server/test_other_clients.py

# SGLang beside ddtree in a virtual environment of its own: it pins other versions of what both use. 2 GB, two to four minutes.
sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: tests/sglang/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/sglang/requirements.txt
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.28.0
	$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# The plugin in real SGLang servers on the CPU, one of two ranks (docs/sglang.md says what is stood in for).
test-sglang: sglang
	PYTHONPATH=tests/sglang/stand_in $(SGLANG)/bin/ddtree fetch smollm2
	PYTHONPATH=tests/sglang/stand_in OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest -q -rP tests/sglang

# A headless Chromium, without which the tests of the chat page are skipped; wants root and apt, and does nothing elsewhere.
browser:
	@.ci/browser

lint: setup
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) $(SGLANG) build *.egg-info
