# Everything runs from .venv, which every target sets up for itself. Needs Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# These trace lines by sys.settrace, which takes coverage's own tracer off and leaves it confused.
TRACING := tests/behaviour/test_events.py tests/behaviour/test_interrupted_step.py tests/behaviour/test_interrupted_swap.py

.PHONY: help setup reproduce quick test test-all soak lint format bench docs docs-serve clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## create .venv with the tested versions; does nothing when up to date

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "torchbelay needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,lab]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps timm k-diffusion trl
	@touch $@

reproduce: setup ## run the paper's experiments and write report/index.html; some minutes, resumable
	$(BIN)/torchbelay reproduce all

quick: setup ## what a change to the core needs: its tests alone, in under a minute
	$(PYTEST) tests/physics tests/ops tests/belay tests/test_optim.py -m "not slow and not thorough"

test: setup ## all tests but the slow ones, with coverage; about 15 minutes on 2 cores
	$(PYTEST) -m "not slow" --cov --cov-report= --ignore=tests/lab --ignore=src/torchbelay/lab $(TRACING:%=--ignore=%)
	$(PYTEST) -m "not slow" tests/lab src/torchbelay/lab $(TRACING)
	$(BIN)/coverage report
	$(BIN)/coverage report --fail-under=95 --format=total \
		--include='src/torchbelay/physics/*,src/torchbelay/ops/*,src/torchbelay/belay/*'

test-all: test ## `make test`, then the slow ones: several processes, a browser, kills and a small soak
	$(PYTEST) -m slow --reruns 1 -raR tests

.PHONY: release
release: ## build the sdist and the wheel into dist/ and check them, with tools in an environment of their own
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install --quiet --constraint constraints.txt build hatchling twine
	rm -rf dist
	$(VENV)-release/bin/python -m build --no-isolation
	$(VENV)-release/bin/python -m twine check --strict dist/*

soak: setup ## an hour of trouble: 10,000 steps with faults, 50 kills, 5,000 damaged checkpoints, 10,000 runs of random events, exceptions at every line, new examples of properties
	TORCHBELAY_SOAK_STEPS=10000 TORCHBELAY_KILLS=50 TORCHBELAY_FUZZ=5000 TORCHBELAY_EVENTS=10000 TORCHBELAY_LINES=1 \
		$(PYTEST) --durations=5 tests/behaviour/test_soak.py tests/behaviour/test_kill.py \
		tests/behaviour/test_killed_merge.py tests/behaviour/test_fuzz_checkpoint.py $(TRACING)
	TORCHBELAY_NEW_EXAMPLES=1 $(PYTEST) -m "not slow" tests/physics tests/ops tests/testing

lint: setup ## style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff rewrite the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## build the site into site/; a warning is an error
	$(BIN)/python docs/site/site_pages.py
	$(BIN)/zensical build --clean --strict

docs-serve: setup ## serve the site on this machine, and build it again whenever a page changes
	$(BIN)/python docs/site/site_pages.py
	$(BIN)/python docs/site/site_pages.py --watch & trap "kill $$!" EXIT; $(BIN)/zensical serve

bench: setup ## time averaging side by side
	$(BIN)/python benchmarks/averaging.py

clean: ## remove .venv and caches
	rm -rf $(VENV) $(VENV)-release .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage \
		.cache build site
