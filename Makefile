# `make demo` and `make test` do all the set-up on a machine with git, make and Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_HOME := $(CURDIR)/.demo
# Two workers, one thread each; each has a Prefect server and a lab of its own. Whoever is done takes tests from the other.
PYTEST := $(BIN)/pytest -q -n 2 --dist worksteal

.PHONY: demo ui test test-lab test-faults lab lab-down zoo zoo-table lint types lock clean
.DELETE_ON_ERROR:

demo: $(VENV)/ready
	@$(BIN)/dflash-eval demo --directory $(DEMO_HOME)

ui: $(VENV)/ready
	@$(BIN)/dflash-eval ui --home $(DEMO_HOME)/home

test: lint types
	$(PYTEST)

# Hosts in network namespaces with real sshds: needs root, iproute2, openssh-server. DFLASH_LAB_REQUIRED=1: a skip is a failure.
test-lab: $(VENV)/ready-dev
	$(PYTEST) -m lab

# Several real hosts on this machine to try things on: train, eval, gpu-a, gpu-b, and their hosts.yaml. Root.
lab: $(VENV)/ready
	$(BIN)/python deployments/lab/lab.py up

lab-down: $(VENV)/ready
	$(BIN)/python deployments/lab/lab.py down

# Whole runs broken on purpose (Ctrl-C, kill -9, full disk in every stage); about ten minutes.
test-faults: $(VENV)/ready-dev
	$(BIN)/pytest -q -m faults

# One small drafter per convention and per known training bug (deployments/zoo/zoo.yaml): train what is missing, one thread.
zoo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python deployments/zoo/build_zoo.py

# Replay the zoo and write deployments/zoo/README.md.
zoo-table: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python deployments/zoo/zoo_table.py

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready-dev
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready: $(VENV)/bin/python requirements.lock pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	@touch $@

# Resolve the locks anew from pyproject.toml, in an environment of their own. torch stays at the version given here.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet torch==2.13.0 setuptools
	build/lock/bin/python -m pip install --quiet --no-build-isolation -e .
	build/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu//' > requirements.lock
	build/lock/bin/python -m pip install --quiet --no-build-isolation -e '.[dev]'
	build/lock/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed 's/+cpu//' | grep -vxFf requirements.lock > requirements-dev.lock

clean:
	rm -rf $(VENV) build .demo .pytest_cache .mypy_cache .ruff_cache
