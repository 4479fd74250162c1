# make demo | test | lint | bench | chaos | peers | soak | wheel | docs: each sets up what it needs by itself.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := torch,ui,plots,data,gguf,fast,remote,hf,lightning,dev
# One thread for each test worker: two workers share two cores, and results do not depend on thread count.
export OMP_NUM_THREADS ?= 1
SEEDS ?= 200
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench chaos peers soak wheel docs setup clean

help:
	@echo "make demo   set up and run the story: a training run dies, nanproof keeps it alive"
	@echo "make test   set up, check types and style, run all tests"
	@echo "make lint   ruff and mypy --strict"
	@echo "make bench  measure the cost side by side, as ratios"
	@echo "make chaos  the fault-injection campaign (SEEDS=2000 a longer one, SEED=numeric:17 one trial again)"
	@echo "make peers  what other libraries make of the same faults"
	@echo "make soak   100,000 guarded steps with rare faults"
	@echo "make wheel  build the wheel into dist/"
	@echo "make docs   regenerate the generated pages in docs/"

setup: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)" "$(EXTRAS)"
	@touch $@

demo: $(READY)
	@$(BIN)/python -m nanproof case radiodiff --story --out "runs/demo-$$(date +%Y%m%d-%H%M%S)"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m compileall -q src # tests start hundreds of processes; none should compile it again
	$(BIN)/python scripts/docs.py --check
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

bench: $(READY)
	$(BIN)/python benchmarks/run.py

chaos: $(READY)
	$(BIN)/python scripts/campaign.py --seeds "$(SEEDS)" --seed "$(SEED)"

peers: $(READY)
	$(BIN)/python scripts/peers.py

soak: $(READY)
	$(BIN)/python scripts/soak.py

wheel: $(READY)
	@$(BIN)/python -m hatchling build -t wheel

docs: $(READY)
	$(BIN)/python scripts/docs.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
