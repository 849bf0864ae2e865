VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
SETUP := $(VENV)/.set-up
DEV := $(VENV)/.set-up-dev
OLDEST := .venv-oldest
USE_EXTRAS := train,plots
DEV_EXTRAS := train,plots,dev

.PHONY: setup demo test test-slow test-oldest lint format clean

# What translating and training need.
setup: $(SETUP)

# The main job, end to end, on sentence pairs that the package generates: minutes on a CPU.
demo: $(SETUP)
	@rm -rf demo
	$(BIN)/hf-vaswani demo-data demo/data
	$(BIN)/hf-vaswani train --config demo
	$(BIN)/hf-vaswani average --run demo/run --last 5 --output demo/run/average
	$(BIN)/hf-vaswani translate --model demo/run/average --input demo/data/test.en --output demo/translations.de
	$(BIN)/hf-vaswani curves --run demo/run --output demo/curves.png
	@paste demo/data/test.en demo/translations.de | head -n 5 | awk -F '\t' '{ print "en: " $$1; print "de: " $$2 }'
	$(BIN)/hf-vaswani score --hypotheses demo/translations.de --references demo/data/test.de
	@echo
	@echo "Next: a sentence of your own, in words of demo/data; its attention; the model in the browser."
	@echo "  echo 'The old man gives the child a book.' | $(BIN)/hf-vaswani translate --model demo/run/average"
	@echo "  $(BIN)/hf-vaswani attention --model demo/run/average --source 'My friends can look at the dog.' --output demo/attention.html"
	@echo "  $(BIN)/pip install --constraint constraints.txt --editable '.[demo]' && $(BIN)/hf-vaswani demo --model demo/run/average"

# One process per core with one thread each. Stealing keeps the tests of a file, and their fixtures, in one process.
test: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

test-slow: $(DEV)
	$(BIN)/pytest -m slow

# Under the oldest transformers that is supported; and what either version wrote, the other reads.
OLDEST_TESTS := tests/model tests/ecosystem tests/data/test_tokenizer.py tests/trainer/test_trainer.py \
	tests/trainer/test_run.py tests/commands/test_translate.py
test-oldest: $(DEV) $(OLDEST)/.set-up
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest --numprocesses auto $(OLDEST_TESTS)
	OTHER_PYTHON=$(abspath $(BIN)/python) $(OLDEST)/bin/pytest -m slow tests/ecosystem/test_versions.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/private_names.py
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) demo

# Pinned versions, so that every machine gets the same; torch first, lest another package choose its build.
define install # the environment, its constraints, extras
	@$(1)/bin/pip install --quiet --disable-pip-version-check --constraint $(2) torch
	@$(1)/bin/pip install --quiet --disable-pip-version-check --constraint $(2) --editable '.[$(3)]'
	@touch $@
endef

$(SETUP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: PyTorch, transformers and what the commands need. This takes some minutes."
	@$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),constraints.txt,$(USE_EXTRAS))

$(DEV): $(SETUP)
	@echo "Adding what the tests need to $(VENV)."
	$(call install,$(VENV),constraints.txt,$(DEV_EXTRAS))

$(OLDEST)/.set-up: pyproject.toml constraints.txt Makefile
	@$(PYTHON) -m venv $(OLDEST)
	@sed 's/^transformers==.*/transformers==5.18.0/' constraints.txt > $(OLDEST)/constraints.txt
	$(call install,$(OLDEST),$(OLDEST)/constraints.txt,$(DEV_EXTRAS))
