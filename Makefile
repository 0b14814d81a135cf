# The only door. Everything a target makes lives in .venv; `make clean` removes that.

PYTHON ?= python3
# Most tests wait for something real: as many workers as cores would leave the cores idle.
WORKERS ?= 6
BACKEND ?= postgres
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.done
BOOK := $(VENV)/.book
PY := $(BIN)/python

export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/.cache/pycache
# Where it is set, each of the suite's thousand processes would compile all it imports anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo install fmt lint types test stress soak mutants coverage matrix contract bench bench-full docs check clean

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  %-10s %s\n", $$1, $$2 }'

demo: $(DONE) ## Play the main job on a private PostgreSQL: contend, kill, take over, fence
	@$(BIN)/pglease demo

install: $(DONE) ## Make .venv with pglease and everything to develop it

$(DONE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pglease needs Python 3.11 or newer: make PYTHON=...")'
	@echo 'Making $(VENV), once: a minute or two.'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -qq --upgrade 'pip>=25.1'
	$(PY) -m pip install -qq --editable . --group dev
	@rm -rf pglease.egg-info  # what building left in the tree; the installed metadata is in .venv
	@touch $@

fmt: $(DONE) ## Format, and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(DONE) ## Check style and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(DONE) ## Check types, strictly
	$(BIN)/mypy --strict

test: $(DONE) ## Run all tests but the long ones; ARGS="-k word" to choose
	@rm -rf $(PYTHONPYCACHEPREFIX)/tmp  # what earlier runs compiled in their own temporary directories
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

stress: $(DONE) ## Simulate 20,000 seeds, hunt known mistakes, explore the models, break servers; ARGS=--whole for all of it
	$(PY) -m tests.stress $(ARGS)

soak: $(DONE) ## Load, leaks, and runs under faults for hours; ARGS="--hours 8"
	$(PY) -m tests.soak $(ARGS)

mutants: $(DONE) ## Change the pure modules in one place at a time, and see a test turn red each time
	$(PY) -m tests.mutants $(ARGS)

coverage: $(DONE) ## Run the tests under coverage, of branches, and report; ARGS=--write
	$(PY) -m tests.covered -n $(WORKERS) --dist loadgroup $(ARGS)

matrix: $(DONE) ## Run the marked tests on older PostgreSQL, PgBouncer, Python 3.12 and 3.13, without psycopg2, oldest frameworks
	@PY=$(PY) WORKERS=$(WORKERS) tests/support/matrix.sh $(ARGS)

contract: $(DONE) ## Run the contract suite on one backend: make contract BACKEND=postgres
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup $(wildcard tests/test_$(BACKEND)_contract.py tests/test_$(BACKEND).py) $(ARGS)

bench: $(DONE) ## Measure beside the bare driver and other libraries; writes benchmarks/RESULTS.md; ARGS=on_postgres
	$(PY) -m benchmarks --install
	$(PY) -m benchmarks --write $(ARGS); status=$$?; $(PY) -m tests.support.readme; exit $$status

bench-full: $(DONE) ## The same at length, with what only an hour shows
	@$(MAKE) --no-print-directory bench ARGS="--effort full $(ARGS)"

docs: $(BOOK) ## Build the documentation site, strictly, into .venv/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "$(VENV)/site/index.html; with search: $(PYTHON) -m http.server --directory $(VENV)/site"

$(BOOK): $(DONE) pyproject.toml
	$(PY) -m pip install -qq --group docs
	@touch $@

check: lint types test ## Everything to run before a commit

clean: ## Remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
