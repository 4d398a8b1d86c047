# Every target makes the environment it needs. From an empty machine: `make demo`, or `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := .venv-demo
DEMO_READY := $(DEMO)/.ready

BENCHMARKS := search_vs_peers simulated groups time_sharing engine_overhead start regret searches demo teams
PYTHONS := python3.11 python3.12 python3.13
TORCH := $(patsubst torch==%,%,$(shell grep '^torch==' constraints.txt))
VERSION_TESTS := $(addprefix tests/,test_space.py test_layering.py algorithms journal run/test_local.py run/test_inline.py \
	study/test_equivalence.py study/test_engine.py $(addprefix fuse/test_,array.py rules.py optim.py capture.py step.py map_effects.py))
TWO_AT_A_TIME := --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)

.PHONY: demo test test-thorough test-steps test-thorough-steps format lint types docs docs-check tests \
	tests-thorough benchmarks benchmarks-quick benchmarks-thorough gpu gpu-dry-run versions wheel shape clean

demo: $(DEMO_READY)  ## a first search of handwritten digits, then a larger one by Shoal and by two plain ways in turn
	@$(DEMO)/bin/python benchmarks/demo.py

# test: everything CI checks, in at most 900 CPU seconds; they are those of all that it starts, which other load hardly
# changes. test-thorough: every case of the tests' products.
test test-thorough: private SHELL := bash
test test-thorough: $(READY)
	@exec 8>&1 9>&2; took=$$(TIMEFORMAT='%0R %U %S'; { time $(MAKE) --no-print-directory $@-steps >&8 2>&9 8>&- 9>&-; } 2>&1); \
	status=$$?; awk "{ printf \"make $@: %d min %d s, %.0f CPU seconds (user + sys)$(LIMIT)\n\", \$$1 / 60, \$$1 % 60, \$$2 + \$$3 }" \
	<<< "$$took"; exit $$status

test: LIMIT = ; the limit is 900

test-steps:
	$(MAKE) $(TWO_AT_A_TIME) benchmarks-quick gpu-dry-run types docs-check lint
	$(MAKE) --no-print-directory tests

test-thorough-steps:
	$(MAKE) $(TWO_AT_A_TIME) benchmarks-quick gpu-dry-run types docs lint benchmarks-thorough
	$(MAKE) --no-print-directory tests-thorough

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

# A warning fails it: a link that leads nowhere, a docstring that is no proper markup, a page that no menu names.
docs: $(READY)  ## the documentation site, in build/docs
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet docs build/docs

docs-check: $(READY)  ## that it can be built, with the same warnings; no pages are written
	$(BIN)/sphinx-build --builder dummy --fail-on-warning --keep-going --quiet docs build/docs-check

# A process for each core; one that has nothing left to do takes tests over from another.
tests tests-thorough: $(READY)
	$(BIN)/pytest --numprocesses logical --dist worksteal $(if $(findstring thorough,$@),--thorough)

# That each of them runs; gpu-dry-run runs those for a GPU.
benchmarks-quick: $(READY)
	$(BIN)/python tools/quick.py $(BENCHMARKS)

benchmarks-quick gpu-dry-run quick-% benchmarks-thorough: export OMP_NUM_THREADS = 1

quick-%: $(READY)
	$(BIN)/python benchmarks/$*.py --quick

benchmarks-thorough: $(READY)
	$(BIN)/python tools/quick.py --experiments

benchmarks: $(READY)  ## every experiment of the papers, and every rival; continues after a kill. AGAIN=1: on another day
	@$(BIN)/pip install --quiet --constraint constraints.txt syne-tune
	@$(BIN)/python tools/experiments.py $(if $(AGAIN),--again)

# With the Python of .venv where there is one, else with PYTHON: a machine with a GPU has torch and often no network.
gpu:  ## measurements and tests that need an NVIDIA GPU, in at most 40 minutes; without a GPU it says so
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu.py

gpu-dry-run: $(READY)  ## all of these at toy size on a CPU; their results are not kept
	$(BIN)/python tools/quick.py --measurements

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each in build/versions, as installed from here, with a torch of its own: make versions TORCH=2.11.0 PYTHONS=python3.12
versions: $(PYTHONS:%=version-%)  ## a part of the tests with every supported Python that this machine has

version-%: HERE = build/versions/$*-torch$(TORCH)
version-%: export OMP_NUM_THREADS = 1
version-%:
	@$* -c '' 2>/dev/null || { echo "There is no $*: not tried"; exit; }; set -ex; $* -m venv $(HERE); \
	grep -v '^torch==' constraints.txt > $(HERE)/constraints.txt; \
	$(HERE)/bin/pip install --quiet torch==$(TORCH); \
	$(HERE)/bin/pip install --quiet --constraint $(HERE)/constraints.txt '.[page,report,samplers,transformers]' pytest hypothesis scikit-learn; \
	$(HERE)/bin/python -m pytest -q $(VERSION_TESTS)

wheel: $(READY)  ## what is released, in dist; on a commit with a tag, only under the version of the tag
	@for tag in $$(git tag --points-at HEAD --list 'v*' 2>/dev/null); do \
	grep -qx "VERSION = \"$${tag#v}\"" src/shoal/core/version.py || \
	{ echo "The tag is $$tag, and src/shoal/core/version.py says otherwise"; exit 1; }; done
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./hydra-shoal-sweeper

shape:  ## files, lines, names and lengths of src/shoal against their limits; fails while any is missed
	$(PYTHON) tools/shape.py

# torch comes first and pinned, so that nothing after it asks for another, with gigabytes of CUDA packages.
define ENVIRONMENT
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shoal needs Python 3.11 or newer; name one: make PYTHON=python3.11 ...")'
@echo "Installing $(2) in $(1); torch takes most of the time"
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet --constraint constraints.txt torch
$(1)/bin/pip install --quiet --constraint constraints.txt --editable $(3)
touch $@
endef

$(READY): pyproject.toml constraints.txt
	$(call ENVIRONMENT,$(VENV),all that the tests need,'.[dev]')

$(DEMO_READY): pyproject.toml constraints.txt
	$(call ENVIRONMENT,$(DEMO),torch with Shoal and scikit-learn,'.[page]' scikit-learn)

clean:
	rm -rf $(VENV) $(DEMO) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
