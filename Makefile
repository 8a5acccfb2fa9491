# Every chore. The logic is in icom/setup_env, whose __init__.py lists the settings, such as
# `make setup-master ENV_MANAGER=venv EXTRAS=aws`.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# The first Python that is new enough; the last is the one that install-miniconda brings.
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10 $(or $(CONDA_PREFIX_DIR),$(HOME)/miniforge3)/bin/python3
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))
ifndef PYTHON
PYTHON = $(eval PYTHON := $(shell for p in $(PYTHONS); do "$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$p" && break; done))$(PYTHON)
endif
NO_PYTHON = found no Python >= 3.10 (tried $(PYTHONS)). Install one (Debian: apt-get install python3-venv; \
Amazon Linux: dnf install python3.11; any: make install-miniconda) or give it: make ... PYTHON=/path/to/python
SETUP = $(or $(PYTHON),$(error $(NO_PYTHON))) -I icom/setup_env
# Runs a command in the environment, which it builds first where it is missing or out of date.
RUN = @$(SETUP) run
SCRIPTS = textual_inversion_icom.py finetune_icom.py
CODE = icom provisioning tests tools $(SCRIPTS)

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-36s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup-master setup-stable-diffusion-icom-master install-dependencies
setup-master: ## Build the environment: conda's diffuser_icom where there is a conda, else .venv
	@$(SETUP) setup
setup-stable-diffusion-icom-master: setup-master ## ICOM's old name for setup-master
install-dependencies: setup-master ## ICOM's old name for setup-master

.PHONY: install-miniconda
install-miniconda: ## Install a conda (Miniforge) in ~/miniforge3, unless there is one
	@$(or $(PYTHON),python3) -I icom/setup_env install-conda

.PHONY: download-training-images
download-training-images: ## Fetch ICOM's five example pictures from the Hugging Face Hub into ./dicoo
	@$(SETUP) pictures

.PHONY: demo
demo: ## Learn a bundled concept and score it before and after: no download, two minutes
	$(RUN) -- icom demo

.PHONY: single-node-test
single-node-test: ## Train 5 steps on the bundled model and pictures, no download
	$(RUN) -- accelerate launch --config_file accelerate_configs/single_cpu.yaml textual_inversion_icom.py --pretrained_model_name_or_path=bundled --train_data_dir=bundled --learnable_property=object --placeholder_token="<concept>" --initializer_token=object --resolution=64 --train_batch_size=1 --seed=7 --gradient_accumulation_steps=1 --max_train_steps=5 --learning_rate=2.0e-03 --scale_lr --lr_scheduler=constant --lr_warmup_steps=0 --output_dir=./textual_inversion_output --mixed_precision auto
	@$(SETUP) setup

.PHONY: bench
bench: ## Measure the speed of SD1.5's training step against the reference script's
	$(RUN) -- icom bench --arch sd15 --compare reference

.PHONY: evaluate-bundled
evaluate-bundled: ## Measure bundled model, judge and concepts (ten minutes); writes benchmarks/bundled-model.*
	$(RUN) -- python -m tools.world.evaluate

.PHONY: scaling
scaling: ## Compute how training scales over hosts; fills the tables of docs/scaling.md
	$(RUN) -- python -m tools.scaling
	$(RUN) -- python -m tools.scaling_unet

.PHONY: image
image: ## Build the container image IMAGE (icom:cpu) with docker, podman or buildah
	@$(SETUP) image

.PHONY: push
push: ## Push the container image IMAGE=REGISTRY/NAME:TAG
	@$(SETUP) push

.PHONY: run
run: ## Run CMD="..." in the environment
	$(RUN) -- $(CMD)

# Several tests at a time, one more than there are cores: many wait for other machines, or for what they started.
# REPORTS=FOLDER keeps JUnit's XML.
WORKERS = $(shell echo $$(($$(nproc) + 1)))
PYTEST = python -m pytest -n $(WORKERS) --maxprocesses 8 --durations=20 $(if $(REPORTS),--junitxml=$(REPORTS)/$@.xml)
COMPUTING = tests/icom/backends tests/icom/engine tests/icom/commands/test_doctor.py

.PHONY: test
test: ## Run the tests that a change needs: a thin path through everything
	@$(SETUP) test-tools
	$(RUN) --extra dev --extra mpi -- $(PYTEST) -m "not long"

# Where the CPU has no more than AVX2, the first run is the second one.
.PHONY: test-all
test-all: test-everything $(if $(shell grep -m 1 avx512f /proc/cpuinfo),test-lower-isa) ## Run all tests, as CI does

.PHONY: test-everything
test-everything: ## Run all tests, those of what computes for this CPU alone
	@$(SETUP) test-tools
	$(RUN) --extra dev --extra mpi -- $(PYTEST)

.PHONY: test-lower-isa
test-lower-isa: ## Run the tests of what computes as if the CPU had AVX2 and nothing newer
	$(RUN) --extra dev --extra mpi -- env ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) $(COMPUTING)

.PHONY: test-ipex
test-ipex: ## Run the tests of backends and engine with the real IPEX, in .venv-ipex (8 GB, which it builds)
	@ENV_MANAGER=venv VENV=.venv-ipex EXTRAS=ipex ICOM_ALLOW_CUDA_TORCH=1 $(SETUP) run --extra dev -- \
		$(PYTEST) tests/icom/backends tests/icom/engine

.PHONY: test-gpu
test-gpu: ## Run the tests of backends on an NVIDIA GPU, with a PYTHON that has a CUDA PyTorch; WHEELS: docs/gpu.md
	@$(PYTHON) tools/gpu.py test $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REPORTS),--reports $(REPORTS))

.PHONY: test-aws
test-aws: ## Provision, train on and tear down a real cluster on AWS: says what it costs (some dollars), and asks
	$(RUN) --extra dev -- python -m tests.support.real_life $(AWS_OPTIONS)

.PHONY: lint
lint: ## Check style, types, shell scripts and Dockerfile
	$(RUN) --extra dev -- ruff check $(CODE)
	$(RUN) --extra dev -- ruff format --check $(CODE)
	$(RUN) --extra dev -- mypy icom provisioning tools $(SCRIPTS)
	$(RUN) --extra dev -- shellcheck provisioning/scripts/*.sh .ci/run
	$(RUN) --extra dev -- hadolint Dockerfile

.PHONY: format
format: ## Put the code into the common style
	$(RUN) --extra dev -- ruff check --fix --quiet $(CODE)
	$(RUN) --extra dev -- ruff format $(CODE)

.PHONY: constraints
constraints: ## Refresh constraints.txt with the newest versions that install together
	@$(SETUP) constraints

.PHONY: clean
clean: ## Delete caches, builds and the output of single-node-test and demo; the environment stays
	rm -rf textual_inversion_output demo .cache build dist icom.egg-info
	find icom provisioning tests -name __pycache__ -type d -prune -exec rm -rf {} +
