# Two commands matter: `make up` and `make test`. The rest are their parts.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
EXTRA ?= cpu
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/$(EXTRA).lock
STAMP := $(VENV)/.ready-$(EXTRA)
# uv does not read pip's setting; both name the folder of wheels that a machine may carry.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help setup up down test test-live figures check format lock clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## The environment .venv from the lock (EXTRA=gpu on a machine with a GPU)

$(STAMP): $(LOCK) pyproject.toml requirements/install.sh
	requirements/install.sh "$(PYTHON)" "$(VENV)" "$(EXTRA)"
	touch $@

up: setup  ## Serve both models, measure them, route by the result (ARGS=--once ends after the answer)
	$(BIN)/workbench up --sweep short --ask $(ARGS)

down:  ## Drain and end the running stack
	$(BIN)/workbench down

test: check  ## The checks and every layer of tests, the live one in its short form; at most 15 minutes
	$(BIN)/pytest -m "not long" -n 2 --dist loadfile --ignore tests/live $(ARGS)
	$(BIN)/pytest -m "not long" tests/live $(ARGS)

test-live: setup  ## The live layer in its long form
	$(BIN)/pytest tests/live $(ARGS)

figures: setup  ## Measure both models again and rewrite the README's table (about ten minutes, an idle machine)
	$(BIN)/python -m benchmarks.readme_figures

check: setup  ## Format, lint, types, import rule, house rules, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/unit/test_house.py tests/unit/test_docs.py

format: setup  ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock:  ## Resolve pyproject.toml again into requirements/cpu.lock (versions and hashes)
	$(BIN)/uv pip compile pyproject.toml --extra bench --extra cpu --extra notebooks --extra guardrails --extra dev \
		--generate-hashes --no-header --no-emit-index-url --no-emit-find-links \
		--python-version 3.11 --output-file requirements/cpu.lock

clean:  ## Remove the environment and caches; models, runs and results in .workbench stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build ./*.egg-info
