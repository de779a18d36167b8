# `make demo` and `make test` need only Linux, python3 (3.11+) and make: they set up .venv by themselves.
PYTHON ?= python3
BIN := .venv/bin
# How many test files run at a time. They wait for processes of their own more than they compute: more than there are cores.
JOBS ?= 4
PYTEST := .venv/bin/pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
STAMP := .venv/.ready

.PHONY: demo test check bench oracle interop e2e soak fuzz docker-check schema clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup_venv.sh
	@PYTHON=$(PYTHON) bash tools/setup_venv.sh
	@touch $@

# DEMO="--tier cpu+disk" make demo: more of `kvevents demo --help`.
demo: $(STAMP)
	@$(BIN)/kvevents demo $(DEMO)

test: $(STAMP)
	@$(PYTEST)

check: $(STAMP)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(PYTEST) --cov=kvevents_service --cov-report=term:skip-covered
	@$(BIN)/python tools/check_docs.py

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

# ORACLE=DIR make oracle: DIR is a virtual environment with vLLM 0.33's Python parts (see tools/oracle.py).
oracle: $(STAMP)
	@$(BIN)/python tools/oracle.py "$(ORACLE)"

# INTEROP=DIR make interop: DIR keeps the real routers' virtual environments (0.4 GB from package registries).
# ENGINE=DIR: DIR has venv/bin/python with vLLM for CPU, and model; without it the rows of the relay are left out.
INTEROP ?= .interop
interop: $(STAMP)
	@PYTHON=$(PYTHON) bash tools/interop/setup.sh "$(INTEROP)"
	@$(BIN)/python tools/interop "$(INTEROP)" $(if $(ENGINE),--engine "$(ENGINE)")

# SOAK_S=90 make soak: seconds of traffic; the comparison at the end comes on top.
SOAK_S ?= 540
soak: $(STAMP)
	@$(BIN)/python -m tools.soak --seconds $(SOAK_S)

# FUZZ_N=20000 FUZZ_SEED=7 make fuzz: how many bad inputs, and which.
FUZZ_N ?= 1000000
FUZZ_SEED ?= 1
fuzz: $(STAMP)
	@$(BIN)/python -m tools.fuzz --inputs $(FUZZ_N) --seed $(FUZZ_SEED)

# Replays docker/Dockerfile without Docker; root and Linux. DOCKER_ARGS: as --build-arg NAME=VALUE.
docker-check: $(STAMP)
	@$(BIN)/python tools/docker_check.py $(DOCKER_ARGS)

# ENGINE=DIR make e2e: DIR is a CPU build of vLLM in a virtual environment (see docs/vllm.md).
e2e: $(STAMP)
	@$(BIN)/python tools/e2e "$(ENGINE)" --interop "$(INTEROP)"

schema: $(STAMP)
	@$(BIN)/python tools/make_schema.py
	@$(BIN)/python tools/make_asyncapi.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache build *.egg-info .coverage
