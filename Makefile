VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up
RUN := demo/run
DATA := demo/data

.PHONY: demo test test-slow lint format clean

# The main job, end to end, on sentence pairs that the package generates: minutes on a CPU.
demo: $(SETUP)
	rm -rf demo
	$(BIN)/hf-vaswani demo-data $(DATA)
	$(BIN)/hf-vaswani train --config demo --train_files $(DATA)/train.en $(DATA)/train.de \
	    --eval_files $(DATA)/val.en $(DATA)/val.de --output_dir $(RUN)
	$(BIN)/hf-vaswani average --run $(RUN) --last 5 --output $(RUN)/average
	$(BIN)/hf-vaswani translate --model $(RUN)/average --input $(DATA)/test.en --output demo/translations.de
	$(BIN)/hf-vaswani curves --run $(RUN) --output demo/curves.png
	@paste -d '\n' $(DATA)/test.en demo/translations.de | head -n 10
	$(BIN)/hf-vaswani score --hypotheses demo/translations.de --references $(DATA)/test.de

test: $(SETUP)
	$(BIN)/pytest

test-slow: $(SETUP)
	$(BIN)/pytest -m slow

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

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
