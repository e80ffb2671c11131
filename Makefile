# The commands people type. `make` alone lists them; each one sets up .venv by itself.

PYTHON  ?= python3
WORKERS ?= 2
ARGS    ?=
MINUTES ?= 30

VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# What tests start beside Python: missing ones are installed, or named in one line.
PROGRAMS := java strace ip

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-fast explore crash check blocking format acceptance bench coverage pins clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml requirements/dev.txt
	@echo "setting up $(VENV) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --editable '.[server,pipeline]' --requirement requirements/dev.txt
	@touch $@

demo: $(READY) ## Start a broker, send, pull, and show what happened
	@$(BIN)/python -m tools.programs java
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(READY) ## Run the tests; results in .acceptance.json and .reports/
	@$(BIN)/python -m tools.programs $(PROGRAMS)
	@WORKERS=$(WORKERS) $(BIN)/python -m tools.suite $(ARGS)

test-slow: $(READY) ## Run the tests that take minutes each: clusters of Spark, drivers killed
	@$(BIN)/python -m tools.programs $(PROGRAMS)
	$(PYTEST) -m long $(ARGS)

test-fast: $(READY) ## Run the tests that need no server (about a minute)
	$(PYTEST) -m "not server and not spark and not slow and not long" $(ARGS)

explore: $(READY) ## Run everything random with new seeds for MINUTES=30; failures in .reports/explore/
	@$(BIN)/python -m tools.explore --minutes $(MINUTES) --workers $(WORKERS) $(ARGS)

crash: $(READY) ## Cut the power at every point, with many more examples
	PULQUE_HYPOTHESIS_PROFILE=$${PULQUE_HYPOTHESIS_PROFILE:-night} $(PYTEST) --timeout=3600 \
	    tests/crash $(ARGS)

check: $(READY) ## Check format, lint, types, layers and what is generated
	$(BIN)/python -m tools.blocking --check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

blocking: $(READY) ## Generate the blocking client from the asyncio one
	$(BIN)/python -m tools.blocking

format: $(READY) ## Format the code and mend what lint can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

acceptance: $(READY) ## Run every test and count the acceptance items it proves
	@$(BIN)/python -m tools.programs $(PROGRAMS)
	@$(BIN)/python -m tools.acceptance $(ARGS)

bench: $(READY) ## Measure against other queues on this machine
	@$(BIN)/python -m bench $(ARGS)

coverage: $(READY) ## Show which lines the fast tests never reach
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m "not server and not spark and not slow and not long" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

pins: $(READY) ## Compile requirements/dev.txt from dev.in
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra server --extra pipeline --no-header \
	    --no-annotate --no-emit-index-url --no-emit-find-links --output-file requirements/dev.txt \
	    pyproject.toml requirements/dev.in

clean: ## Remove what these commands made, .venv too
	rm -rf $(VENV) .reports .acceptance.json .coverage .coverage.* .hypothesis .mypy_cache \
	    .pytest_cache .ruff_cache .import_linter_cache
