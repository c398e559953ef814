# Every target is explained by its `##` line: run `make help`.
# Variables: PYTHON (interpreter that creates .venv), TEST_JOBS (test processes), PYTEST_ARGS, ORACLES, QUICKSTART_ARGS, QUICKSTART_DIR.

PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3 || echo python3.11)
QUICKSTART_DIR ?= quickstart
QUICKSTART_ARGS ?=
TEST_JOBS ?= auto
PYTEST_ARGS ?=
ORACLES ?= ../shared/oracles
PYTEST = $(BIN)/python -m pytest -q -n $(TEST_JOBS) --maxprocesses 4 --dist loadscope

BIN := .venv/bin
STAMP := .venv/.installed
TEST_STAMP := .venv/.installed-tests
PATHS := grounded_rl tests recipes $(wildcard benchmarks)

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-bare test-slow test-gpu check format lint types imports notebooks recipes oracles bench build clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements/ci.txt setup.cfg pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or newer is needed: got $$("$(PYTHON)" --version 2>&1). Run make PYTHON=/path/to/python3.11." >&2; exit 2; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv \
		|| { echo "error: .venv could not be created. Install the venv module of your Python (python3.11-venv on Debian)." >&2; exit 2; }
	$(BIN)/python -m pip install --quiet -r requirements/ci.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	@touch $@

$(TEST_STAMP): $(STAMP) requirements/extras.txt
	$(BIN)/python -m pip install --quiet -r requirements/extras.txt
	-$(BIN)/python -m tests.retrieval.es_node prepare
	@touch $@

install: $(STAMP) ## create .venv with the pinned requirements and this package (again only when they change)

quickstart: $(STAMP) ## build the index, evaluate, train with GCA, evaluate again, write quickstart/report.md
	$(BIN)/grounded-rl quickstart --out $(QUICKSTART_DIR) $(QUICKSTART_ARGS)

test: $(TEST_STAMP) ## run the default tests: CPU, offline, minutes
	$(PYTEST) $(PYTEST_ARGS)

test-bare: $(STAMP) ## run the default tests without installing any optional package
	$(PYTEST) $(PYTEST_ARGS)

test-slow: $(TEST_STAMP) ## run the slow tests only
	$(BIN)/python -m pytest -q -m slow $(PYTEST_ARGS)

test-gpu: $(TEST_STAMP) ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(PYTEST_ARGS)

check: lint types imports test recipes ## everything a change must pass

format: $(STAMP) ## fix style in place
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)

lint: $(STAMP) ## check style, change nothing
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)

types: $(TEST_STAMP) ## check types of credit, rollouts, text and retrieval
	$(BIN)/mypy

imports: $(STAMP) ## check which package may import which
	$(BIN)/lint-imports

notebooks: $(STAMP) ## execute every notebook (run make quickstart first)
	$(BIN)/python -m pytest -q --nbmake --nbmake-timeout=600 notebooks

recipes: $(STAMP) ## parse every recipe strictly
	$(BIN)/python -m pytest -q tests/test_recipes.py

oracles: $(STAMP) ## compare credit with recorded outputs of other implementations (ORACLES=folder)
	$(BIN)/python -m tests.oracles $(ORACLES)

bench: $(STAMP) ## run every benchmark and print its table
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

build: $(STAMP) ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## remove caches and build products
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find grounded_rl tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv and the quickstart's results as well
	rm -rf .venv $(QUICKSTART_DIR)
