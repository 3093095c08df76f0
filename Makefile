# Two commands: `make quickstart` measures, `make test` tests. Both set up $(VENV) first.
VENV ?= .venv
DEPS ?= auto
PYTHON ?= python3
PY = $(VENV)/bin/python

.PHONY: venv quickstart test lint

venv:
	@PYTHON=$(PYTHON) bash requirements/install.sh $(VENV) $(DEPS)

quickstart: venv
	$(PY) -m ep_ray.sweep +exp=quickstart

test: venv lint
	$(PY) -m pytest

lint: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
