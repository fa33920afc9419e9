# make demo and make test do all set-up by themselves. Everything is installed into .venv, from pip only.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# the CPU build that installs on any machine; users of the library keep the torch they have
TORCH := torch==2.13.0
STAMP := $(VENV)/.ready
# make test PYTEST="-k audit": further arguments for pytest
PYTEST ?=
SEED ?= $(shell date +%s)

.PHONY: venv demo test check format chaos nightly bench bench-control soak docs clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "feedline needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "making $(VENV) (once; downloads about 500 MB)"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -qq --disable-pip-version-check $(TORCH)
	@$(RUN) -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: venv
	@$(RUN) examples/demo.py

test: venv
	@$(RUN) -m pytest -n 2 --dist loadgroup -m "not slow" $(PYTEST)

check: venv
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check --quiet .
	@$(RUN) -m mypy
	@$(RUN) docs/generate.py --check
	@$(RUN) -m pytest -q -p no:cacheprovider tests/unit/test_imports.py

format: venv
	@$(RUN) -m ruff format --quiet .
	@$(RUN) -m ruff check --quiet --fix .

# long and random; the seed is printed, and make chaos SEED=N plays the same again
chaos: venv
	@echo "seed $(SEED)"
	@$(RUN) -m pytest -m slow --seed $(SEED) --timeout 1200 $(PYTEST)

# ten to twenty times the examples of make test, drawn anew; make nightly SEED=N plays the same again
nightly: venv
	@echo "seed $(SEED)"
	@HYPOTHESIS_PROFILE=nightly $(RUN) -m pytest tests/properties -n 2 --hypothesis-seed=$(SEED) --timeout 3600 $(PYTEST)

bench: venv
	@test -f benchmarks/run.py || { echo "benchmarks/run.py is missing: there are no benchmarks in this tree" >&2; exit 1; }
	@$(RUN) benchmarks/run.py

bench-control: venv
	@$(RUN) benchmarks/control_plane.py

soak: venv
	@test -f benchmarks/run.py || { echo "benchmarks/run.py is missing: there is no soak run in this tree" >&2; exit 1; }
	@$(RUN) benchmarks/run.py --soak

docs: venv
	@$(RUN) docs/generate.py

clean:
	@rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
