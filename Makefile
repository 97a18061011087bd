# Distributed PyTorch in an Apptainer container. `make` alone prints what there is to type.
SHELL := /bin/bash
PYTHON ?= python3
FLAVOUR ?= cpu
JOB ?= nccl

# What is set on the command line or in the environment is text: a $ in it is a $, for make as well.
TEXT := ARGS BASE DO FLAVOUR GPUS IMAGE IMAGE_URI JOB NODES OUT SCRIPT SHA256 SITE SUITE TASKS TIME TORCHVISION
$(foreach name,$(TEXT),$(if $(value $(name)),$(eval override $(name) := $$(value $(name)))))
IMAGE ?= $(CURDIR)/build/Pytorch_DL_HPC-$(FLAVOUR).sif
export IMAGE

# A value as one word of the shell, whatever is in it; and an option that is left out without a value.
quoted = '$(subst ','\'',$1)'
option = $(if $($2),--$1=$(call quoted,$($2)))

.DEFAULT_GOAL := help
.PHONY: help setup image pull launch shell demo test-image test-unit test-local conformance measure lint lock cluster clean clean-cache

help: ## print this text
	@echo "Distributed PyTorch in an Apptainer container"
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 /p' Makefile | while read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

setup: ## install Apptainer where it is missing, prove that it runs a container
	scripts/setup-apptainer.sh

image: setup ## build the image [FLAVOUR=cpu BASE=auto|docker|debian SUITE=bookworm TORCHVISION=auto|none OUT=FILE REFRESH=1 V=1]
	$(PYTHON) scripts/image.py build --flavour $(call quoted,$(FLAVOUR)) $(call option,base,BASE) $(call option,suite,SUITE) \
	    $(call option,torchvision,TORCHVISION) $(call option,out,OUT) $(if $(REFRESH),--refresh)

pull: setup ## fetch an image [IMAGE_URI=FILE|oras://…|docker://…|https://… SHA256=… OUT=FILE]
	$(PYTHON) scripts/registry.py pull $(call quoted,$(IMAGE_URI)) --out $(call quoted,$(or $(OUT),$(IMAGE))) $(call option,sha256,SHA256)

launch: ## submit a job [JOB=nccl|mpi|torchrun SCRIPT=FILE ARGS="…" NODES=1 GPUS=0 TASKS=1 TIME=1:00:00 SITE=generic DRY_RUN=1]
	$(PYTHON) scripts/launch.py --job $(call quoted,$(JOB)) --script=$(call quoted,$(SCRIPT)) --arguments=$(call quoted,$(ARGS)) \
	    --image $(call quoted,$(IMAGE)) $(call option,site,SITE) $(call option,nodes,NODES) $(call option,gpus,GPUS) \
	    $(call option,tasks,TASKS) $(call option,time,TIME) $(if $(DRY_RUN),--dry-run)

shell: ## a shell inside the image, on this machine
	@source scripts/jobs/common.sh; prepare_job; exec "$${CONTAINER[@]}" bash --norc

demo: image ## the main job: Apptainer, the image, the distributed examples on 4 local ranks
	scripts/demo.sh

test-image: ## the image's own %test
	@source scripts/jobs/common.sh; set_container; exec "$${CONTAINER[0]}" test "$$IMAGE"

test-unit: ## tests that need no image: seconds [T="pytest arguments"]
	tests/run.sh unit $(T)

test-local: image ## all tests: real image, real Open MPI, real Slurm [T="pytest arguments"]
	tests/run.sh all $(T)

conformance: image ## torch's own tests of a backend, on the mpi backend: 2 and 4 ranks, many minutes
	tests/run.sh conformance $(T)

measure: ## what the container costs: its start, import torch inside and bare
	$(PYTHON) scripts/measure.py $(call quoted,$(IMAGE))

lint: ## ruff, mypy, shellcheck
	tests/run.sh lint

lock: ## refresh the locked requirements of the image and of the tests
	scripts/lock.sh

cluster: ## a two-node Slurm cluster on this machine, for trying things [DO=up|down|status]
	$(PYTHON) tests/slurm/cluster.py $(call quoted,$(or $(DO),status))

clean: ## remove build/
	rm -rf build

clean-cache: ## remove cached base systems, wheels and layers
	$(PYTHON) scripts/image.py clean-cache
