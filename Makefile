VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up

.PHONY: demo test test-slow lint format clean

# The main job, end to end, on sentence pairs that the package generates: minutes on a CPU.
demo: $(SETUP)
	rm -rf demo
	$(BIN)/hf-vaswani demo-data demo/data
	$(BIN)/hf-vaswani train --config demo
	$(BIN)/hf-vaswani average --run demo/run --last 5 --output demo/run/average
	$(BIN)/hf-vaswani translate --model demo/run/average --input demo/data/test.en --output demo/translations.de
	$(BIN)/hf-vaswani curves --run demo/run --output demo/curves.png
	@paste -d '\n' demo/data/test.en demo/translations.de | head -n 10
	$(BIN)/hf-vaswani score --hypotheses demo/translations.de --references demo/data/test.de

# A process a core; two threads in each would be in each other's way.
test: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto

test-slow: $(SETUP)
	$(BIN)/pytest -m slow

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(SETUP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) demo

# Pinned versions, so that every machine gets the same; torch first, lest another package choose its build.
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,plots,dev]'
	touch $@
