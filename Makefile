# Every target makes what it needs first: the environment in .venv, at the versions of constraints.txt. `make demo` installs what a
# user installs; the others what a developer needs. Each adds only what is missing.
#   make PYTHON=/path/to/python   another interpreter than the first of python3.11 to python3.14
#   make test ARGS='-k truncate'  arguments for pytest, for `pgsieve demo`, for the benchmark

PYTHON ?=
ARGS ?=
BIN := .venv/bin
# pip reads a build's constraints from here, too; the second name is for pip 25.3 and later.
PIP_ENVIRONMENT := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

.DEFAULT_GOAL := help
.PHONY: help prerequisites setup demo test test-fast test-versions test-oldest test-19 test-dagster test-spark40 test-long test-constraints test-fresh soak soak-filters soak-hard-day check docs pictures audit sbom benchmarks java clean

##@ Begin here

help: ## this list
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

prerequisites: # says what to install where Python or Java is missing
	@PYTHON='$(PYTHON)' sh scripts/prerequisites.sh >/dev/null

setup: prerequisites .venv/.developed .venv/.jars ## install the pinned versions into .venv and fetch Delta's jars (once)

demo: .venv/.installed ## replicate from a PostgreSQL server of its own into Delta tables, and check them
	@$(BIN)/pgsieve demo $(ARGS)

##@ Test

# Many containers set PYTHONDONTWRITEBYTECODE. Then each process compiles all modules that it imports, and pytest all tests.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# In the order of the folders: the long tests of faults are not left for the end.
SHARED := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Tests with the mark `drawn` take long, or run on the oldest server, too: one in eight of them runs here.
test: setup ## the tests: PostgreSQL is the oracle, Spark and Delta are real
	@PGSIEVE_SEED=$${PGSIEVE_SEED:-$$($(BIN)/python -c 'import random; print(random.randrange(2**32))')} \
	    PGSIEVE_DRAWN=$${PGSIEVE_DRAWN:-8} PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-2} \
	    $(PYTEST) $(SHARED) -m 'not long' $(ARGS)

# Tests that `make test` runs for two seconds each, and the scenarios: it has Dagster run one of eight.
RANDOM := tests/properties tests/fuzzing tests/faults/test_overlapping_runs.py \
    tests/decoding/plugins/test_plugins_of_a_server.py tests/replication
test-long: setup ## for the night: all drawn and long tests, other writers and engines, more random cases; prints what it drew
	@PGSIEVE_SHOW_DRAWN=1 $(PYTEST) $(SHARED) -m 'long or drawn' $(ARGS)
	@PGSIEVE_SHOW_DRAWN=1 PGSIEVE_DAGSTER=all PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-120} \
	    $(PYTEST) $(SHARED) $(RANDOM) -m 'not long' $(ARGS)

test-fast: setup ## the tests that need no JVM, and get none
	@JAVA_HOME=/none PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-1} $(PYTEST) -m 'not spark and not slow and not drawn and not long' --numprocesses auto --dist loadfile $(ARGS)

# The server's version decides what can be published and is sent, not how changes are applied.
SAME_IN_ALL_VERSIONS := large or test_basic_changes or test_lakes or test_names or types or test_truncate \
    or test_batches or test_small_changes or test_large_changes or test_key_conflicts \
    or test_schema_changes or test_streamed_transactions or test_error_handling or test_identity_changes \
    or test_replica_identity or test_partition_trees or test_table_set or test_leaf_identities \
    or test_filtered_changes or columns_dropped_and_added or test_soft_deletes or test_histories
test-versions: setup ## what depends on the server's version in tests/replication, on PostgreSQL 16, and 15 as installed
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target test-version-16 test-version-15

test-version-%:
	@echo "PostgreSQL $*"
	@PGSIEVE_POSTGRES_VERSION=$* $(PYTEST) tests/replication -m 'not long' -k 'not ($(SAME_IN_ALL_VERSIONS))' $(ARGS)

test-oldest: setup ## the same on the oldest of them alone, by two processes
	@$(MAKE) --no-print-directory test-version-15 ARGS='--numprocesses 2 --dist worksteal $(ARGS)'

# No wheel has it yet: it is fetched once, from Debian's suite experimental (tests/fixtures/downloaded_postgres.py).
TESTS_19 := tests/replication tests/postgresql_19 tests/properties tests/decoding tests/resources/postgres \
    tests/assets/steps/slot_consumption tests/pipelines/commands
test-19: setup ## replication, random workloads, row filters, values and commands on PostgreSQL 19, publisher and subscriber
	@PGSIEVE_POSTGRES_VERSION=19 PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-10} $(PYTEST) $(SHARED) -m 'not long' $(TESTS_19) $(ARGS)

# Another Dagster is found before the packages of .venv, and its dependencies take the place of theirs. It is imported before
# pytest makes errors of warnings, because the oldest Dagster uses deprecated functions of pydantic.
DAGSTER := dagster dagster-dg-cli dagster-graphql dagster-webserver
DAGSTER_oldest := $(DAGSTER:%=%==1.12.0) dagster-dlt==0.28.0 dagster-pyspark==0.28.0
DAGSTER_newest := --upgrade $(DAGSTER:%='%<1.14') 'dagster-dlt<0.30' 'dagster-pyspark<0.30'
DAGSTER_TESTS := tests/pipelines/test_component.py tests/pipelines/test_definitions.py tests/pipelines/test_increments_in_dagster.py \
    tests/pipelines/test_copies_in_dagster.py tests/pipelines/test_published.py tests/assets/test_runless_events.py \
    tests/resources/lake/test_secret_settings.py tests/examples tests/orchestration/test_dagster.py
test-dagster: setup ## definitions, runs and the example project on the oldest Dagster that is supported, and on the newest
	@$(MAKE) --no-print-directory test-dagster-oldest test-dagster-newest

test-dagster-%: setup
	@$(BIN)/python -m venv .venv/dagster-$*
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$(.venv/dagster-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/dagster-$*/bin/python -m pip install --quiet $(DAGSTER_$*)
	@.venv/dagster-$*/bin/python -c 'import dagster; print("Dagster", dagster.__version__)'
	@PATH="$(CURDIR)/$(BIN):$$PATH" .venv/dagster-$*/bin/python -c "import sys, dagster, pytest; sys.exit(pytest.main(sys.argv[1:]))" $(DAGSTER_TESTS) -m 'not long' $(ARGS)

# Another Spark, in the same way; the S3 server is a program of .venv.
SPARK_40 := .venv/spark-4.0/bin/python
SPARK_TESTS := tests/replication/test_row_filters.py tests/replication/test_identity_changes.py \
    tests/replication/test_filter_restrictions.py tests/properties/test_row_filters.py
test-spark40: setup ## row filters, identities and lakes on S3 with Spark 4.0 and Delta 4.0
	@$(BIN)/python -m venv .venv/spark-4.0
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	    > $$($(SPARK_40) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(SPARK_40) -m pip install --quiet 'pyspark[connect]>=4.0,<4.1' 'delta-spark>=4.0,<4.1'
	@$(SPARK_40) -c 'import pyspark; print("Spark", pyspark.__version__)'
	@PGSIEVE_WRITER='spark large' PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-30} $(SPARK_40) -m pytest $(SPARK_TESTS) $(ARGS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(SPARK_40) -m pytest tests/resources/lake/test_s3_commits.py tests/replication/test_lakes.py -k 's3 and not schema_changes' $(ARGS)

##@ Look for faults, for an hour each

BUDGET = PGSIEVE_BUDGET_SECONDS=$${PGSIEVE_BUDGET_SECONDS:-3600}
soak: setup ## random workloads beside CREATE SUBSCRIPTION, for an hour or PGSIEVE_BUDGET_SECONDS
	@$(BUDGET) $(PYTEST) --timeout 0 -s tests/properties/test_random_workloads.py $(ARGS)

soak-filters: setup ## random row filters beside the server's verdicts, for an hour or PGSIEVE_BUDGET_SECONDS
	@$(BUDGET) $(PYTEST) --timeout 0 -s tests/properties/test_row_filters.py -k random_filters $(ARGS)

soak-hard-day: setup ## kills, crashes, power cuts, ALTERs, full disks beside random writes, for an hour or PGSIEVE_BUDGET_SECONDS
	@$(BUDGET) $(PYTEST) --timeout 0 -s tests/faults/test_hard_day.py $(ARGS)

##@ Check

check: .venv/.developed ## formatting, lint, types, layers, Dagster's definitions, and the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/dg check defs
	@$(MAKE) --no-print-directory docs

# Resolved by uv, in an environment of its own: pip evaluates markers for the Python that runs it.
test-constraints: .venv/.developed ## whether constraints.txt resolves, with wheels alone, for every Python that is supported
	@test -x .venv/uv/bin/uv || { $(BIN)/python -m venv .venv/uv && .venv/uv/bin/pip install --quiet 'uv>=0.9,<1'; }
	@$(BIN)/python -m scripts.resolve_constraints .venv/uv/bin/uv

test-fresh: ## both of README's commands on minimal Debian systems with Python 3.11.2, 3.13 and 3.14 (as root, with debootstrap)
	@scripts/fresh_machines.sh $(ARGS)

##@ Make

docs: .venv/.developed ## the site in build/site, from docs/; fails where a link is dead
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: setup ## screenshots and the recording of the demo in docs/images, from what really runs (needs a Chromium)
	@test -x .venv/pictures/bin/termtosvg || { $(BIN)/python -m venv .venv/pictures && .venv/pictures/bin/pip install --quiet 'termtosvg-ng>=1.4,<2'; }
	@$(BIN)/python -m scripts.pictures .venv/pictures/bin/termtosvg $(ARGS)

audit: setup ## ask a vulnerability database about the pinned dependencies (needs the network; not part of CI)
	@test -x .venv/audit/bin/pip-audit || { $(BIN)/python -m venv .venv/audit && .venv/audit/bin/pip install --quiet 'pip-audit>=2.9,<3'; }
	@.venv/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

# An environment of its own: .venv has the tools of developers, too.
sbom: setup ## what an installation consists of, with licences, in build/sbom.cdx.json (CycloneDX)
	@test -x .venv/sbom/bin/cyclonedx-py || { $(BIN)/python -m venv .venv/sbom && .venv/sbom/bin/pip install --quiet 'cyclonedx-bom>=7.5,<8'; }
	@$(BIN)/python -m venv --clear .venv/installed
	@$(PIP_ENVIRONMENT) .venv/installed/bin/python -m pip install --quiet '.[tracing,ui]'
	@.venv/installed/bin/python -m pip uninstall --quiet --yes pip
	@$(BIN)/python -m scripts.sbom .venv/sbom/bin/cyclonedx-py .venv/installed/bin/python pyproject.toml build/sbom.cdx.json

benchmarks: setup ## decoding alone, a slot's two transports, replication beside a built-in subscription, the check
	@$(BIN)/python benchmarks/decode.py
	@$(BIN)/python benchmarks/transports.py
	@$(BIN)/python benchmarks/replication.py $(ARGS)
	@$(BIN)/python benchmarks/consistency.py

java: setup ## compile pgsieve's three Java classes: the log store for S3, the user without a name, the warm engine (needs a JDK)
	@$(BIN)/python -m scripts.java

clean: ## remove .venv, caches and build leftovers; data stays
	rm -rf .venv .mypy_cache .ruff_cache .import_linter_cache .hypothesis build spark-warehouse metastore_db derby.log
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment that works stays, whichever Python made it: another Python's `-m venv` would keep the link to the first one
# beside a library of its own.
ENVIRONMENT = { $(BIN)/python -c 'import ssl' 2>/dev/null \
    || { python=$$(PYTHON='$(PYTHON)' sh scripts/prerequisites.sh python) && "$$python" -m venv --clear .venv; }; }
INSTALL = $(ENVIRONMENT) && $(PIP_ENVIRONMENT) $(BIN)/python scripts/install.py
.venv/.installed: pyproject.toml constraints.txt
	@echo 'Installing pgsieve, as a user does, into .venv (about a minute the first time) ...'
	@$(INSTALL) demo,ui
	@touch $@

.venv/.developed: pyproject.toml constraints.txt
	@echo 'Installing the versions of constraints.txt into .venv (some minutes the first time) ...'
	@$(INSTALL) dev
	@touch .venv/.installed $@

.venv/.jars: .venv/.developed resources/lake/jars.py
	@echo "Fetching Delta's jars ..."
	@$(BIN)/python -m pgsieve.resources.lake.jars 2>.venv/jars.log || { cat .venv/jars.log >&2; exit 1; }
	@touch $@
