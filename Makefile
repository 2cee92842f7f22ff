# Every target makes what it needs first: the environment in .venv, at the versions of constraints.txt.
#   make PYTHON=/path/to/python   another interpreter than the first of python3.11, python3.12, python3.13
#   make test ARGS='-k truncate'  arguments for pytest, for `pgsieve demo`, for the benchmark

PYTHON ?=
ARGS ?=
BIN := .venv/bin
# pip reads a build's constraints from here, too; the second name is for pip 25.3 and later.
PIP_ENVIRONMENT := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.PHONY: help prerequisites setup demo test test-fast check benchmarks clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

prerequisites: # says what to install where Python or Java is missing
	@PYTHON='$(PYTHON)' sh scripts/prerequisites.sh >/dev/null

setup: .venv/.jars ## install the pinned versions into .venv and fetch Delta's jars (once)

demo: setup ## replicate from a PostgreSQL server of its own into Delta tables, and check them
	@$(BIN)/pgsieve demo $(ARGS)

test: setup ## every test: PostgreSQL is the oracle, Spark and Delta are real
	@$(BIN)/python -m pytest $(ARGS)

test-fast: setup ## the tests that need no Spark
	@$(BIN)/python -m pytest -m 'not spark' --numprocesses auto --dist loadfile $(ARGS)

check: setup ## formatting, lint, types, layers, and Dagster's definitions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/dg check defs

benchmarks: setup ## decoding alone, a slot's two transports, and replication beside a built-in subscription
	@$(BIN)/python benchmarks/decode.py
	@$(BIN)/python benchmarks/transports.py
	@$(BIN)/python benchmarks/replication.py $(ARGS)

clean: ## remove .venv, caches and build leftovers; data stays
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis build spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt | prerequisites
	@echo 'Installing the versions of constraints.txt into .venv (some minutes the first time) ...'
	@python=$$(PYTHON='$(PYTHON)' sh scripts/prerequisites.sh python) && "$$python" -m venv .venv
	@$(PIP_ENVIRONMENT) $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

.venv/.jars: .venv/.installed resources/jars.py
	@echo "Fetching Delta's jars ..."
	@$(BIN)/python -m resources.jars 2>.venv/jars.log || { cat .venv/jars.log >&2; exit 1; }
	@touch $@
