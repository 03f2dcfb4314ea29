# make demo   three small experiments and their page       make test      lint, types, fast tests
# make docs   the site, in build/docs                      make dist      wheel and sdist, twice the same
# make links  the addresses in the site's pages (needs the network)
# make test-versions   the oldest and newest Python and torch, in throw-away environments
# make test-compile, test-interpreter, test-models, test-runs   the slow suites   make test-all  all
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
INTERPRETER := TRITON_INTERPRET=1 $(PYTEST) tests/kernels tests/optim/test_rows.py

.PHONY: demo docs links dist test test-all test-compile test-interpreter test-models test-runs test-versions lint clean

demo: .venv/demo
	$(BIN)/geoparam demo --out demo

docs: .venv/docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -c docs . build/docs
	@echo "Open build/docs/index.html"

links: .venv/docs
	$(BIN)/python -m sphinx -W -q -b linkcheck -D nb_execution_mode=off -c docs . build/links

test: lint
	$(PYTEST) -n 2 -m "not compile and not interpreter and not slow"
	$(INTERPRETER) -n 2 -m "interpreter and not slow"

test-compile: .venv/dev
	TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 $(PYTEST) -m "compile and not slow"

test-interpreter: .venv/dev
	$(INTERPRETER) -n 2 -m interpreter

test-models: .venv/dev
	$(PYTEST) -n 2 tests/models -m slow

test-runs: .venv/dev
	$(PYTEST) -n 2 tests --ignore tests/models -m slow

test-versions: .venv/demo
	$(BIN)/python tests/versions.py

dist: .venv/docs
	$(BIN)/python tests/distribution.py

test-all: test test-compile test-interpreter test-models test-runs

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist demo .mypy_cache .pytest_cache .ruff_cache

# Stamps: each says that its extras are installed as these two files ask.
.venv/demo: pyproject.toml constraints.txt
	@echo "Installing geoparam and PyTorch into .venv (the first time takes some minutes)"
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[cli,plots]'
	@touch $@

.venv/dev: .venv/demo
	@echo "Installing the development tools into .venv"
	$(INSTALL) -e '.[dev]'
	@touch $@

.venv/docs: .venv/demo
	@echo "Installing what the site needs into .venv"
	$(INSTALL) -e '.[docs]'
	@touch $@
