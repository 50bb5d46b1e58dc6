# The commands of this repository. `make` alone lists them.
#
#   PORT, MODEL, ARGS   for `make serve`: the port, the model, and any other flags of `phalanx serve`
#   PYTHON              the interpreter that makes .venv (default: the newest of python3.11 to python3.14, or python3)
#   PIP_ARGS            more flags for pip, such as an index with CPU builds of torch
#   TESTS               for `make test`: which tests (default: all)

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
TESTS ?= tests
WORKERS ?= 2
# Each test worker and each server that it starts computes on one thread; more would only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help setup native serve demo negative-proof chaos soak test test-all test-optimized check format docs lock clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup:  ## make .venv with everything, and fetch the demo model; quick when done (PYTHON=… PIP_ARGS=…)
	@scripts/setup

native:  ## build the native library again after a change in native/ (make setup does it too, but from scratch)
	@$(BIN)/cmake -S native -B build/native -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python --log-level=WARNING >/dev/null
	@$(BIN)/cmake --build build/native

serve:  ## start the server on 127.0.0.1:8000 (PORT=… MODEL=… ARGS=…)
	@SETUP_DEMO=$(if $(MODEL),0,1) scripts/setup
	@exec $(BIN)/phalanx serve $(if $(MODEL),"$(MODEL)") $(if $(PORT),--port "$(PORT)") $(ARGS)

demo: setup  ## an answer streams from two ranks, one is killed in mid-stream, the answer goes on
	@$(BIN)/python scripts/demo.py

test: setup  ## run the test suite (TESTS=…)
	@$(PYTEST) -m "not slow" $(TESTS)

test-all: setup  ## run the test suite with the slow tests
	@$(PYTEST) $(TESTS)

test-optimized: setup  ## run the test suite with every process under `python -O`
	@PYTHONOPTIMIZE=1 $(PYTEST) -m "not slow" $(TESTS)

negative-proof: setup  ## run the tests of recovery with recovery switched off: each has to fail for that reason (TESTS=…)
	@$(PYTEST) --without-recovery $(TESTS)

chaos: setup  ## faults at random for a while (MINUTES=5 SEED=… EXECUTORS=mp,nodes,ray), or one again (CASE="…")
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/chaos.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(EXECUTORS),--executors $(EXECUTORS)) $(if $(CASE),--case "$(CASE)")

soak: setup  ## constant load with a fault every 20 to 60 s (MINUTES=60 SEED=… EXECUTORS=mp,nodes JSON=soak.json)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
		$(if $(EXECUTORS),--executors $(EXECUTORS)) $(if $(JSON),--json $(JSON))

check: setup  ## lint, formatting, types and import layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: setup  ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup  ## write the generated pages of docs/ again
	@$(BIN)/python scripts/write_docs.py

lock: setup  ## write requirements.lock from what is installed
	@$(BIN)/python scripts/write_lock.py

clean:  ## remove everything that the other commands made (the demo model stays in its cache folder)
	@rm -rf native/{CMakeCache.txt,CMakeFiles,CMakeInit.txt,cmake_install.cmake,build.ninja,.skbuild-info.json,.cmake} \
		native/.ninja_* native/libnanobind* phalanx/kernels/_native*
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find phalanx tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
