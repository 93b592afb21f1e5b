PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Why is the sky blue?

.PHONY: demo serve docs test test-all check clean

demo: $(VENV)/.demo  ## Answer a question with the default model, with and without the cache.
	$(BIN)/infer generate --chat --compare --max-new-tokens 64 "$(PROMPT)"

serve: $(VENV)/.demo  ## Serve the default model to OpenAI's clients, and a page, at http://127.0.0.1:8000.
	$(BIN)/infer serve

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs  ## Serve the documentation at http://127.0.0.1:8001.
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.dev  ## Run the tests in up to four processes: one more than cores, as many tests wait for processes.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $$($(BIN)/python -c 'import os; print(min(os.cpu_count() + 1, 4))') --dist worksteal

test-all: export INFER_TEST_ALL = 1
test-all: $(VENV)/.ray test  ## The same with more prompts, longer ones, all products of choices, and Ray.

check: export NO_MKDOCS_2_WARNING = 1
check: $(VENV)/.dev  ## Lint, format, types and the documentation.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/mkdocs build --strict --quiet

$(VENV)/.demo: pyproject.toml constraints.txt
	@echo "installing into $(VENV), which takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot,server]'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

clean:  ## Remove the virtual environment and caches.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
