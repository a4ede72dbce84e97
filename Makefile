# `make rollout` runs a demo; `make test` runs the test suite. Both create `.venv/` first if it is missing.

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3.12),python3.11)
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
VENV := .venv
BIN := $(VENV)/$(SCRIPTS)
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Allows bytecode files. Without them, every worker would compile all modules of this project that it imports.
export PYTHONDONTWRITEBYTECODE :=

# Number of parallel test processes. More than cores are useful, because many tests mostly wait.
JOBS ?= 4
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

ROLLOUT_ENV ?= meltingpot:commons_harvest__open
ROLLOUT_ENVS ?= 4
ROLLOUT_STEPS ?= 200
ROLLOUT_NAME = rollouts/$(subst /,-,$(lastword $(subst :, ,$(ROLLOUT_ENV))))

.PHONY: help venv try rollout test golden test-long test-quick test-small test-portable test-newest test-isaaclab test-full test-python test-oldest compat matrix faults fuzz soak mutants lint format types examples bench bench-quick docs docs-serve dist wheels clean
.DELETE_ON_ERROR:
.SHELLFLAGS := -eu -c

help:
	@echo "make rollout      run $(ROLLOUT_ENVS) Melting Pot envs in parallel; pictures and data go to rollouts/"
	@echo "make try          install envherd with Gymnasium only (1.2 GB, in .venv.small/), check the machine, run CartPole"
	@echo "make test         run the tests that take less than a few seconds each"
	@echo "make test-long    run the others: a Ray cluster, the pages, the examples, sizing, sweeps"
	@echo "make test-python  run the tests of stepping again, without the C extension"
	@echo "make test-oldest  run quick tests of the facades with the oldest supported TorchRL, Gymnasium and SB3"
	@echo "make test-quick   run only fast tests"
	@echo "make test-small   run the fast tests with Gymnasium only, in .venv.small/"
	@echo "make test-portable  run the tests of the portable pool: on macOS and Windows for real, on Linux by emulation"
	@echo "make test-newest  run tests with the newest releases of all libraries, also beyond the upper bounds"
	@echo "make test-isaaclab  run IsaacLab's own env classes over stubs of the simulator's modules (Python 3.11)"
	@echo "make golden       compare the data of all envs, modes and facades with recorded hashes (or CASES=PATTERN)"
	@echo "make test-full    run the test suite with long sweeps, trainings and all Melting Pot substrates (an hour or two)"
	@echo "make matrix       check every family of envs in full (or FAMILY=NAME); writes docs/reports/families.md"
	@echo "make compat       run the tests with the oldest and newest versions (or ROWS=PATTERN); writes docs/reports/versions.md"
	@echo "make faults       cause every fault of envs, workers and machine in every state; writes docs/reports/faults.md"
	@echo "make soak         run $(MINUTES) minutes of random kills, hangs, resets, opens and closes; writes docs/reports/soak.md"
	@echo "make mutants      change one place of the source at a time, and check that a test fails (docs/contributing.md)"
	@echo "make fuzz         run MINUTES minutes (default 10) of random operations, deaths and interrupts, with new seeds"
	@echo "make venv         only create $(VENV)/, with everything installed"
	@echo "make bench        compare envherd with other libraries (most of an hour, on an idle machine); writes docs/reports/benchmarks.md"
	@echo "make bench-quick  compare them with few workloads, in a minute"
	@echo "make docs         build the documentation site in build/site; warnings are errors (make docs-serve shows the site)"
	@echo "make dist         build the sdist, and the wheel for this platform; URL=https://... makes their links absolute"
	@echo "make wheels       build the wheels of a release from the sdist of make dist, in containers"
	@echo "make lint types examples"

venv: $(STAMP)

# Because of the stamp, a second run does nothing until one of these files changes.
$(STAMP): pyproject.toml setup.py $(wildcard */native/*.[ch]) constraints.txt envherd/install_meltingpot.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; install it, or: make venv PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python envherd/install_meltingpot.py -c constraints.txt
	@echo "installing everything else, which takes some minutes"
	$(PIP) install -qq --progress-bar off -c constraints.txt -e ".[all,dev]"
	@$(BIN)/python -c "import sys; sys.version_info < (3, 13) or print('left out: dm-control, as labmaze has no wheel for it')"
	@$(BIN)/python setup.py -q build_ext --inplace || echo "the C extension was not built; everything runs in Python" >&2
	@touch $@

# A venv with few extras: 1.2 GB instead of 5.5, of which torch is the largest part.
SMALL := .venv.small
SMALL_BIN := $(SMALL)/$(SCRIPTS)
SMALL_STAMP := $(SMALL)/.installed
define small_venv
@$(1)/$(SCRIPTS)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
$(1)/$(SCRIPTS)/python -m pip --disable-pip-version-check install -qq --progress-bar off
endef

$(SMALL_STAMP): pyproject.toml setup.py $(wildcard */native/*.[ch]) constraints.txt
	$(call small_venv,$(SMALL)) -c constraints.txt -e ".[gymnasium,dev]"
	@touch $@

try: $(SMALL_STAMP)
	$(SMALL_BIN)/envherd doctor
	$(SMALL_BIN)/envherd rollout CartPole-v1 --envs 4 --steps 200

test-small: $(SMALL_STAMP)
	$(SMALL_BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder -m "not slow and not long and not full and not quiet"

# On Linux, tests take away from a script what other systems lack. There the same script runs as it is.
test-portable: $(SMALL_STAMP)
ifeq ($(shell uname),Linux)
	$(SMALL_BIN)/python -m pytest -n $(JOBS) tests/executor/pools/test_portable.py
else
	ENVHERD_LACKS=nothing $(SMALL_BIN)/python tests/lacking/everything.py
endif

# IsaacLab's wheel requires older versions of what all other extras need, so it is put above .venv without its
# requirements, for these tests only.
ISAACLAB := build/isaaclab
test-isaaclab: $(STAMP)
	$(PIP) install -qq --progress-bar off --no-deps --upgrade --target $(ISAACLAB) isaaclab==2.3.2 toml prettytable trimesh \
		flatdict warp-lang hydra-core omegaconf "antlr4-python3-runtime<4.10"
	PYTHONPATH=$(ISAACLAB) $(BIN)/python -m pytest tests/workers/test_isaaclab.py

rollout: $(STAMP)
	@mkdir -p $(dir $(ROLLOUT_NAME))
	rm -rf $(ROLLOUT_NAME)
	$(BIN)/envherd rollout $(ROLLOUT_ENV) --envs $(ROLLOUT_ENVS) --steps $(ROLLOUT_STEPS) --seed 0 \
		--out $(ROLLOUT_NAME) --gif $(ROLLOUT_NAME).gif --png $(ROLLOUT_NAME).png

# The tests marked `quiet` measure time, so they run last and alone.
test: $(STAMP)
	$(PYTEST) -m "not quiet and not long"
	$(BIN)/python -m pytest -m "quiet and not long" $$(grep -rl "mark\.quiet" --include="test_*.py" tests)

# Tests that each take seconds: a Ray cluster, the blocks of the pages, the examples, sizing, sweeps.
test-long: $(STAMP)
	$(PYTEST) -m "long and not quiet"
	$(BIN)/python -m pytest -m "long and quiet" $$(grep -rl "mark\.quiet" --include="test_*.py" tests)

# LONG= leaves out the files that take half of the time.
LONG ?= tests/executor/protocol/test_property.py tests/faults/test_interrupts.py
test-python: $(STAMP)
	ENVHERD_NATIVE=0 $(PYTEST) -k "not facades" tests/executor/protocol/test_fast_calls.py tests/executor/protocol/test_stepping.py \
		tests/executor/protocol/test_exchange.py tests/workers/test_loop.py $(LONG)

# Installs the oldest supported libraries over those of .venv for these tests only; `make compat` runs more tests.
test-oldest: $(STAMP)
	$(BIN)/python -m tools.compat --above --jobs $(JOBS)

# Installs the newest releases, without constraints and upper bounds: what breaks here breaks for users soon. TensorDict
# is tested without TorchRL also, which may not accept the newest yet. The tools have a venv, as PYTHON may lack them.
NEWEST := .venv.newest
test-newest:
	$(call small_venv,$(NEWEST)) packaging "setuptools>=77"
	$(NEWEST)/$(SCRIPTS)/python setup.py -q build_ext --inplace
	$(NEWEST)/$(SCRIPTS)/python -m tools.compat --released --jobs $(JOBS)

# A wanted change of data: `make golden WRITE=--write`.
CASES ?=
WRITE ?=
golden: $(STAMP)
	$(BIN)/python -m tools.golden "$(CASES)" $(WRITE)

test-quick: $(STAMP)
	$(PYTEST) -m "not slow and not long and not full and not quiet"

test-full: $(STAMP)
	ENVHERD_FULL=1 $(BIN)/python -m pytest

FAMILY ?= test_family
matrix: $(STAMP)
	ENVHERD_UNSAMPLED=1 ENVHERD_MATRIX=docs/reports/families.md $(BIN)/python -m pytest tests/contracts/test_matrix.py -k "test_family and ($(FAMILY))" \
		-o faulthandler_timeout=0

# Takes an hour or two and 12 GB of disk; see `python -m tools.compat --help`. Rows that are not run do not change.
ROWS ?=
compat: $(STAMP)
	$(BIN)/python -m tools.compat --rows "$(ROWS)"

# The tests append to earlier recordings, so they can also be run in parts.
RECORDED := build/faults.jsonl
faults: $(STAMP)
	@mkdir -p build
	ENVHERD_FULL=1 ENVHERD_FAULTS=$(RECORDED) $(BIN)/python -m pytest tests/faults/test_matrix.py tests/faults/test_surroundings.py
	$(BIN)/python -m tools.faults_page $(RECORDED)
	$(BIN)/python -m benchmarks.faults --write

MINUTES ?= 20
soak: $(STAMP)
	$(BIN)/python -m tools.soak --minutes $(MINUTES) --write

# FILES: paths, or path:line for all changes of a line. The default, the whole core, takes most of an hour.
SAMPLE ?= 10
SEED ?= 0
FILES ?=
mutants: $(STAMP)
	$(BIN)/python -m tools.mutants --sample $(SAMPLE) --seed $(SEED) --jobs $(JOBS) $(if $(TOTAL),--total $(TOTAL)) $(if $(PART),--part $(PART) --limit 300) $(FILES)

fuzz: MINUTES = 10
fuzz: $(STAMP)
	$(BIN)/python -m tools.fuzz --minutes $(MINUTES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy -p envherd
	$(BIN)/mypy tests examples benchmarks tools

examples: $(STAMP)
	@for script in examples/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

# A stopped run continues where it ended; delete the file to start again.
BENCH := benchmarks/results/bench.json
bench: $(STAMP)
	$(BIN)/python -m benchmarks --json $(BENCH) --resume
	$(BIN)/python -m benchmarks.page --write

bench-quick: $(STAMP)
	@mkdir -p build
	$(BIN)/python -m benchmarks --quick --json build/bench-quick.json

# The site needs only its own packages, because docstrings are read from the sources without importing them.
SITE := .venv.docs
SITE_STAMP := $(SITE)/.installed
export NO_MKDOCS_2_WARNING := 1

$(SITE_STAMP): pyproject.toml constraints.txt
	@$(SITE)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(SITE)
	$(SITE)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project'] \
		['optional-dependencies']['docs'], sep='\n')" > $(SITE)/requirements.txt
	$(SITE)/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt -r $(SITE)/requirements.txt
	@touch $@

docs: $(SITE_STAMP)
	$(SITE)/bin/mkdocs build --strict --quiet

docs-serve: $(SITE_STAMP)
	$(SITE)/bin/mkdocs serve

# The wheel is built from the sdist, so a file that is missing in the sdist breaks the build.
URL ?=
dist wheels: export ENVHERD_URL = $(URL)
BUILDER := .venv.dist
dist:
	rm -rf dist
	$(call small_venv,$(BUILDER)) -c constraints.txt setuptools
	$(BUILDER)/$(SCRIPTS)/python setup.py -q sdist
	$(BUILDER)/$(SCRIPTS)/python -m pip wheel -q --no-deps -w dist dist/*.tar.gz

# An index takes manylinux wheels only. Needs docker or podman; one wheel for each processor that this machine runs.
wheels:
	$(call small_venv,$(BUILDER)) cibuildwheel
	$(BUILDER)/$(SCRIPTS)/python -m cibuildwheel --output-dir dist dist/*.tar.gz

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
