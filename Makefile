# Every command sets up .venv first where it must; `make demo` and `make test` are the two to know.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format types imports docs check zoo survey inject cases bench renew wheel clean

# The first of these that runs; say PYTHON=... for another.
PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c '' 2>/dev/null && echo $(p))))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python found: install Python 3.11 or newer, or say make PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1); Python 3.11 to 3.14 is needed: say make PYTHON=/path/to/python"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (PyTorch is large: the first time takes some minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## check an honest and a faulty model, and show both reports
	@$(BIN)/intently demo

test: $(STAMP) ## run every test
	@$(BIN)/python -m pytest -q $(ARGS)

lint: $(STAMP) ## style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(STAMP) ## mend what lint can mend by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(STAMP) ## type-check src
	@$(BIN)/pyright

imports: $(STAMP) ## the layers import one way only
	@$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation; a warning fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: test lint types imports docs ## everything that must pass

zoo: $(STAMP) ## hit and false-alarm rates on the faulty and clean models of tests/zoo
	@$(BIN)/python -m tests.zoo $(ARGS)

survey: $(STAMP) ## check tiny models of the installed transformers types
	@$(BIN)/python -m benchmarks.survey $(ARGS)

inject: $(STAMP) ## plant every fault in released architectures, and count what a check finds
	@$(BIN)/python -m benchmarks.inject $(ARGS)

cases: $(STAMP) ## check the releases that public reports name, each in an environment of its own
	@$(BIN)/python -m benchmarks.cases $(ARGS)

bench: $(STAMP) ## time and memory against PyTorch's own attention
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@$(BIN)/python -m benchmarks.bench $(ARGS)

renew: $(STAMP) ## renew the picture in the README and the sessions in docs/ from real runs
	@$(BIN)/python -m intently.demo --svg docs/assets/report.svg
	@$(BIN)/python docs/sessions.py
	@$(BIN)/python docs/one_head.py

wheel: $(STAMP) ## build the wheel into dist/
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist .

clean: ## remove what the commands made, .venv too
	rm -rf $(VENV) dist build site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
