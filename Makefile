# make demo and make test need nothing done before: they make .venv with pinned versions first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check bench slow clean

# One pip command, with torch pinned in it, so that no other package pulls in another torch.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/lamella compare --config src/lamella/train/demo.yaml --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/lamella bench

clean:
	rm -rf $(VENV) build dist src/*.egg-info
