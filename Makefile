# Everything a person types. `make demo` trains, `make test` proves, `make check` reads the code.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.PHONY: demo test test-gpu check format protos docs lock bench clean

demo: $(READY)  ## train the digits job: 2 shards, 2 workers, asynchronous
	$(BIN)/parashard run examples/digits.toml

test: $(READY)  ## every test that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-gpu: $(READY)  ## the tests marked gpu, on a machine with a CUDA device
	$(BIN)/python -m pytest -m gpu

check: $(READY)  ## format, lint, types, import rules, generated code and documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/protos.py --check
	$(BIN)/python tools/job_reference.py --check

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(READY)  ## generate the code of protos/*.proto again
	$(BIN)/python tools/protos.py

docs: $(READY)  ## write the reference of the job file again
	$(BIN)/python tools/job_reference.py

bench: $(READY)  ## the benchmarks that need no peer
	$(BIN)/python -m benchmarks.scheduling

lock:  ## resolve pyproject.toml into requirements.lock again (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --extra dev \
	  --output-file requirements.lock pyproject.toml

# The environment is rebuilt when the lock file or the package's metadata changes.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
