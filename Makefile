# Everything works on a fresh machine with Python >= 3.11 and its pip and venv; see `make help`.

# The CPU build of torch is taken unless a GPU is seen. PILOTFISH_TORCH=cpu|cuda decides by hand.
export PILOTFISH_TORCH ?= auto
export TORCH_VERSION   ?= 2.13.0
export TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

BIN  := .venv/bin
ARGS ?=
CODE := broker_config checkpoint workers client tests $(wildcard benchmarks docs)

# These run side by side; the others start processes of their own, which need the cores.
APART := tests/unit tests/contracts

# Test processes share the cores: one thread each, and waiting threads sleep instead of spinning.
check test exhaustive mutants: export OMP_NUM_THREADS ?= 1
check test exhaustive mutants demo: export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help venv demo test exhaustive check mutants format wheel up clean distclean

help: ## this list
	@echo "pilotfish: make TARGET [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

venv: .venv/.installed ## make .venv with the package and all that its tests need

.venv/.installed: pyproject.toml .ci/install
	@bash .ci/install .venv
	@touch $@

demo: venv ## answer a few prompts on the default pair (ARGS go to `pilotfish demo`)
	$(BIN)/pilotfish demo $(ARGS)

up: venv ## Valkey, workers and dashboard in the foreground (ARGS go to `pilotfish up`)
	$(BIN)/pilotfish up $(ARGS)

test: venv ## the whole test suite (ARGS go to pytest, in one run then)
ifeq ($(strip $(ARGS)),)
	$(BIN)/pytest $(APART) -n auto
	$(BIN)/pytest $(addprefix --ignore=,$(APART))
else
	$(BIN)/pytest $(ARGS)
endif

exhaustive: venv ## the law of every single parameter under every rule, with many samples
	$(BIN)/pytest -m exhaustive -n auto $(ARGS)

check: venv ## before a commit: lint, format, types, quick unit tests
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/pytest tests/unit -m "not slow" -n auto $(ARGS)

mutants: venv ## plant faults in the sampling code; a test must see each (ARGS: parts of names)
	$(BIN)/python -m tests.mutation_check $(ARGS)

format: venv ## rewrite the code as `check` wants it
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

wheel: venv ## build the distribution into dist/
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove caches and build outputs
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
