# Two commands on a fresh machine: `make demo` and `make test`. `make help` lists the rest.

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3.13 python3 2>/dev/null))
BIN := .venv/bin
INSTALLED := .venv/.installed
# Tests wait for processes more than they compute: whole files run side by side.
SIDE_BY_SIDE := -n $(or $(JOBS),2) --dist loadfile
SGLANG := .sglang/.installed
# One thread per process: two threads under contention are many times slower on small machines.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help dev demo test sglang-cpu test-sglang ci nightly fuzz check lint types packaging format bench-peers clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

dev: $(INSTALLED)  ## create .venv and install everything; TORCH_INDEX_URL names another index for torch

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14), f"Python 3.11-3.13 is needed, got {sys.version}"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	mkdir -p .links && ln -sfn .. .links/vagen
	touch $@

demo: $(INSTALLED) $(if $(filter sglang,$(ENGINE)),$(SGLANG))  ## train the tiny model on FrozenLake with every process running; SEED=0, ENGINE=sglang, ARGS="--fresh"
	$(BIN)/vagen demo --seed $(or $(SEED),0) --engine $(or $(ENGINE),local) $(ARGS)

test: $(INSTALLED)  ## unit and integration tests; JOBS=2 files at a time
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow and not nightly" $(ARGS)

sglang-cpu: $(SGLANG)  ## install SGLang for CPUs into .sglang (2 GB), for test-sglang and for demo ENGINE=sglang

$(SGLANG): tools/sglang_cpu/requirements.txt
	flock .sglang.lock sh -c 'test $@ -nt $< || TORCH_INDEX_URL="$(TORCH_INDEX_URL)" tools/sglang_cpu/install.sh $(PYTHON) .sglang'

test-sglang: $(INSTALLED) $(SGLANG)  ## the engine contract against real SGLang on this machine's CPU
	$(BIN)/python -m pytest -m sglang tests/engine $(ARGS)

ci: check $(SGLANG)  ## what continuous integration runs: check, all tests but the nightly ones, those with SGLang apart
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not nightly and not sglang" $(ARGS)
	$(BIN)/python -m pytest -m sglang tests/engine

nightly: $(INSTALLED)  ## tests that take longer than five minutes
	$(BIN)/python -m pytest -m nightly -s $(ARGS)

fuzz: $(INSTALLED)  ## fuzz the decoding of messages, guided by coverage; SECONDS=60
	$(BIN)/python tests/fuzz/fuzz_requests.py -max_total_time=$(or $(SECONDS),60) -max_len=65536 build/fuzz

check: lint types  ## lint and types (packaging is tested by tests/test_packaging.py)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy actor buffer common configs envs learner tools

format: $(INSTALLED)  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PEERS := ray reverb transferqueue

bench-peers: $(PEERS:%=.peers/%/done)  ## Pythons of the systems that `vagen bench buffer` compares with (several GB)

# One that cannot be installed must not keep the others away: the benchmark says what pip said.
.peers/%/done: tools/bench/peers/%.txt
	rm -rf .peers/$* && $(PYTHON) -m venv .peers/$*
	if .peers/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $< 2> .peers/$*/pip.log \
	    && .peers/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . 2>> .peers/$*/pip.log; \
	then touch .peers/$*/installed; else tail -n 1 .peers/$*/pip.log | tee .peers/$*/failed; fi
	touch $@

clean:  ## remove what make and the tests created, except runs/
	rm -rf .venv .sglang .sglang.lock .links .peers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
