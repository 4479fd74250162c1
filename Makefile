# make help lists the targets: each sets up what it needs by itself.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := torch,ui,plots,data,gguf,fast,remote,hf,lightning,dev
# One thread for each test worker: they share the cores, and results do not depend on thread count.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes are started: none should compile again what another has imported.
unexport PYTHONDONTWRITEBYTECODE
SEEDS ?= 200
MINUTES ?= 10
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all pytest test-fast coverage lint bench cure-bench chaos fuzz load peers engines soak spikes loops heal portability pages versions wheel docs release-check setup clean pictures foresight

help:
	@echo "make demo   set up and run the story: a training run dies, one command finds its cure, the cured run trains"
	@echo "make test   set up, check types and style, run the tests"
	@echo "make test-all     the tests of make test, and the longest trainings, which it leaves out"
	@echo "make test-fast    tests without the slow ones (cases, ranks, browser), for the inner loop"
	@echo "make portability  train the cases under three instruction sets and ten seeds; writes docs/cases/README.md"
	@echo "make pages        measure the four cases again and write their pages in docs/cases"
	@echo "make versions     run the tests under the oldest, a middle and the newest torch; writes docs/versions.md"
	@echo "make coverage     all tests, and the lines that none of them runs"
	@echo "make lint   ruff, mypy --strict, the words that are not used here, and whether docs/ is up to date"
	@echo "make bench  measure the cost side by side, as ratios"
	@echo "make cure-bench   cure twenty dying programs, beside two baselines; writes docs/cure.md"
	@echo "make chaos  the fault-injection campaign (SEEDS=2000 a longer one, SEED=numeric:17 one trial again)"
	@echo "make fuzz   look for inputs that break a reader (MINUTES=10 in all)"
	@echo "make load   a thousand clients at once on the page of watch --web"
	@echo "make peers  what other libraries make of the same faults"
	@echo "make engines  DDP to DeepSpeed and Ray, bare and guarded, with the real libraries; writes docs/engines.md"
	@echo "make soak   100,000 guarded steps with rare faults"
	@echo "make spikes healthy runs of many kinds: how often the guard would veto a step of them; writes docs/guard.md"
	@echo "make loops  training loops of many shapes, bare and under nanproof run; writes docs/run.md"
	@echo "make heal   train the four originals with --heal on ten seeds; writes docs/heal.md"
	@echo "make foresight  runs that die and healthy ones: how early a warning comes, and how often wrongly; writes docs/foresight.md"
	@echo "make wheel  build the wheel into dist/"
	@echo "make release-check  wheel, sdist, metadata, README, versions, import without torch"
	@echo "make docs   regenerate what is generated in docs/, run the sessions it shows, build the site into build/site"

setup: $(READY)

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)" "$(EXTRAS)"
	@touch $@

demo: $(READY)
	@$(BIN)/python scripts/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/words.py
	$(BIN)/python scripts/docs.py --check

test: $(READY)
	@$(MAKE) --no-print-directory -j 2 lint pytest

pytest: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not campaign"

test-all: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The two rooms left out are slow as a whole, and collecting them would load every trainer in each worker.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not campaign" $(foreach room,cases integrations,--ignore=tests/$(room))

coverage: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term

portability: $(READY)
	$(BIN)/python scripts/portability.py

pages: $(READY)
	for name in mm-ldlm radiodiff lora-sft restran-mhc; do \
	  $(BIN)/python -m nanproof case $$name --compare --page docs/cases/$$name.md --out "$$(mktemp -d)/$$name"; done

versions: $(READY)
	$(BIN)/python scripts/versions.py

bench: $(READY)
	$(BIN)/python benchmarks/run.py

cure-bench: $(READY)
	$(BIN)/python scripts/cure_bench.py

chaos: $(READY)
	$(BIN)/python scripts/campaign.py --seeds "$(SEEDS)" --seed "$(SEED)"

fuzz: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[fuzz]"
	$(BIN)/python scripts/fuzzing.py --minutes "$(MINUTES)"

load: $(READY)
	$(BIN)/python scripts/load.py --write

peers: $(READY)
	$(BIN)/python scripts/peers.py
	$(BIN)/python scripts/remedies.py --write

engines: $(READY)
	$(BIN)/python scripts/engines.py

soak: $(READY)
	$(BIN)/python scripts/soak.py

loops: $(READY)
	$(BIN)/python scripts/run_table.py --write
	$(BIN)/python scripts/run_table.py --packages --write

heal: $(READY)
	$(BIN)/python scripts/heal_table.py

spikes: $(READY)
	$(BIN)/python scripts/spikes.py

foresight: $(READY)
	$(BIN)/python scripts/foresight.py

wheel: $(READY)
	@$(BIN)/python -m hatchling build -t wheel

docs: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/python scripts/docs.py
	$(BIN)/python scripts/sessions.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site is ready. Look at it: $(BIN)/python -m http.server -d build/site"

release-check: $(READY)
	$(BIN)/python scripts/release_check.py

pictures: $(READY)
	$(BIN)/python scripts/pictures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
