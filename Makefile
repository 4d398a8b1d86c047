# Every target makes the environment it needs. From an empty machine: `make demo`, or `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test format lint types tests benchmarks-quick clean

demo: $(READY)  ## search hyper-parameters of two models on handwritten digits
	$(BIN)/shoal run examples/digits.py

test: lint types benchmarks-quick tests  ## everything CI checks

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# A process for each core; one that has nothing left to do takes tests over from another.
tests: $(READY)
	$(BIN)/pytest --numprocesses logical --dist worksteal

benchmarks-quick: $(READY)
	$(BIN)/python benchmarks/search_vs_peers.py --quick
	$(BIN)/python benchmarks/chaos.py --quick
	$(BIN)/python benchmarks/fusion.py --quick
	$(BIN)/python benchmarks/scheduling.py --quick
	$(BIN)/python benchmarks/simulated_makespan.py --quick
	$(BIN)/python benchmarks/groups.py --quick
	$(BIN)/python benchmarks/auto.py --quick
	$(BIN)/python benchmarks/time_sharing.py --quick
	$(BIN)/python benchmarks/algorithms.py --quick
	$(BIN)/python benchmarks/packing.py --quick
	$(BIN)/python benchmarks/placement.py --quick
	$(BIN)/python benchmarks/engine_overhead.py --quick
	$(BIN)/python benchmarks/regret.py --quick

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# torch comes first and pinned, so that nothing after it asks for another, with gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shoal needs Python 3.11 or newer; name one: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
