# Everything runs in .venv, made here from pyproject.toml and the exact pins of constraints.txt.
#
#   make demo      paceline compare: AdamW, its averages, PACE, WSD and Schedule-Free on a small language
#                  model, at three learning rates (under six minutes on two cores with set-up)
#   make test      all tests but the longest (under ten minutes on two cores after set-up)
#   make check     lint, types, import directions, fast tests (under a minute)
#   make docs      the documentation site, into build/site
#   make figures   tables and figure of docs/results.md and docs/cost.md, from records/
#   make bench     time and memory of a step next to AdamW's, and the optimizer's share of a training step
#   make test-all  make test, and what is too slow for every day (under 80 minutes on two cores); results go
#                  to records/: the longest tests, 2,000 random sequences of operations,
#                  1,000 kills of trainers, 20 of comparisons, 200 damaged files, a soak; and the table of
#                  promises, records/matrix.md
#   make mutants   small changes of the optimizer's rule, paths and checkpoints: which does no test notice?

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
DEMO := .venv/demo-ready
INSTALL := $(BIN)/python -m pip install --constraint constraints.txt --editable
TODAY := $(shell date +%F)
# One more test at once than there are cores, each on one: many wait for processes of their own. Compiled tests
# are kept, which saves a third of the time to find them.
WORKERS = $(shell $(BIN)/python -c 'import os; print(len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count())')
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test check docs figures bench test-all mutants clean

demo: $(DEMO)
	$(BIN)/paceline compare --out demo-output

test: $(READY)
	$(PYTEST) --junit-xml build/tests/test.xml
	# JAX in processes of its own: one that has imported it must not fork, which tests of other parts do.
	# Few tests: a worker more would be imports.
	$(PYTEST) -n 2 --junit-xml build/tests/optax.xml tests/integrations/test_optax.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	# Integrations import the trainers that they are for, which takes longer than many tests: make test has them.
	# Nothing of it waits for other processes: a worker more would be imports.
	$(PYTEST) -n auto -m "not slow and not long" --ignore=tests/integrations --ignore=src/paceline/integrations

docs: $(READY)
	# Without the variable the theme prints a notice about its own future on every build.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

figures: $(READY)
	$(BIN)/python records/studies/pages.py

bench: $(READY)
	$(BIN)/paceline bench
	$(BIN)/python benchmarks/training.py

test-all: test
	PACELINE_SEQUENCES=2000 $(PYTEST) tests/optim/test_state_machine.py
	$(BIN)/python tests/lm/kills.py --kills 1000 --jobs 2 --record records/$(TODAY)-kills.json
	PACELINE_KILLS=20 $(PYTEST) --junit-xml build/tests/long.xml -m long
	$(BIN)/python tests/damages.py --damages 200 --record records/$(TODAY)-damages.json
	$(BIN)/python tests/lm/soak.py --record records/$(TODAY)-soak.json
	$(BIN)/python tests/matrix.py build/tests/*.xml --out records/matrix.md

mutants: $(READY)
	$(BIN)/python -m pip install --constraint constraints.txt --group mutants
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

clean:
	rm -rf .venv demo-output build dist mutants .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(READY): $(DEMO)
	$(INSTALL) ".[save,compare,theory,data,huggingface,optax,lightning,ray]" --group dev
	touch $(READY)

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --upgrade "pip>=25.1"
	$(INSTALL) ".[compare]"
	touch $(DEMO)
