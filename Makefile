# `make` lists the targets. The variables that a user may set:
#   TORCH    the torch to install in .venv, as pip takes it: make test TORCH=torch==2.13.0
#   PYTHON   the Python that makes .venv, and that the GPU targets use as it is
#   ARGS     more arguments for demo, pytest, test-corpus, bench and the tests on a GPU: make test ARGS='-k softmax',
#            make test-corpus ARGS='timm:*'
# FASTLAYERS_CUDA_ARCHS, CUDA_HOME, CXX and MAX_JOBS reach the build: fastlayers/build.py explains them.

PYTHON ?= python3
TORCH ?= torch>=2.11
ARGS ?=
PYTHONS ?= $(PY)

VENV := .venv
PY := $(VENV)/bin/python
# Makes an environment that is not there, installs in it, and shows how that goes.
INSTALL = $(PYTHON) tools/environment.py
# One name for each content of pyproject.toml and each TORCH: the environment is made anew when either changes.
ENV := $(VENV)/made-for-$(shell echo '$(TORCH)' | cat - pyproject.toml | cksum | cut -d' ' -f1)
# The libraries whose models are the corpus, in an environment of their own.
LIBRARIES := tests/corpus/requirements.txt
PACKAGES := tests/corpus/packages.txt
CORPUS := .venv-corpus
CORPUS_ENV := $(CORPUS)/made-for-$(shell cat $(LIBRARIES) $(PACKAGES) pyproject.toml | cksum | cut -d' ' -f1)
# The tools that are run on a patched model, in an environment of their own.
TOOLS := .venv-tools
TOOLS_ENV := $(TOOLS)/made-for-$(shell cat tests/tools.txt pyproject.toml | cksum | cut -d' ' -f1)
# Recipes read it from the environment, where the > of torch>=2.11 is no redirection.
export TORCH

.PHONY: help demo test test-all env build lint budgets types pytest docs format test-libraries test-corpus test-tools test-gpu test-random test-sanitizer test-asan bench bench-models wheel release test-wheel clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: build  ## environment, build, and the main examples: a network that is trained here, and a pretrained one, patched
	$(PY) examples/digits_resnet.py $(ARGS)
	$(PY) examples/patch_minilm.py $(ARGS)

# lint and types have one core: the tests begin beside them.
CHECK := $(MAKE) --no-print-directory --keep-going --jobs=2 lint types pytest

test: build  ## environment, build, lint, types, and of the tests a share of the cases that a seed draws: minutes
	@$(CHECK) DRAW=--draw

test-all: build  ## the same with every case, as a release passes it, half an hour, and 20,000 random sequences, resumable
	@FASTLAYERS_SEQUENCES=20000 $(CHECK)

env: $(ENV)  ## the environment in .venv

$(ENV):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(PYTHON) is Python " + sys.version.split()[0] + "; fastlayers needs 3.10 or later: make ... PYTHON=python3.12")'
	@# Cleared: what another torch brought, such as its Triton, would stay.
	@rm -rf $(VENV)
	@$(INSTALL) $(VENV) $$TORCH
	@# A CPU build of torch brings no Triton; the oldest one that fastlayers supports then runs the interpreter's tests.
	@$(PY) -c 'import triton' 2>/dev/null || $(INSTALL) $(VENV) triton==3.6.0
	@FASTLAYERS_BUILD_EXT=0 $(INSTALL) $(VENV) --editable '.[test]'
	@touch $@

build: $(ENV)  ## compile csrc into fastlayers/_C.so, and what runs regions into fastlayers/_regions_*.so
	@$(PY) -m fastlayers build

lint: $(ENV)  ## ruff: rules and format; import-linter: rooms, layers, no cycles; budgets.toml: what can be counted
	$(PY) -m ruff check --output-format concise .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache
	$(PY) tools/budgets.py

budgets: build  ## everything in budgets.toml, built, run and measured: half an hour
	$(PY) tools/budgets.py --all

types: $(ENV)  ## mypy
	$(PY) -m mypy

pytest: $(ENV)  ## the tests alone, on the build that is there
	@# In random order; ARGS=--randomly-seed=N repeats order and draw of the run that printed N.
	@# Two workers share the cores, so an idle OpenMP thread must not spin on one. And both, and the processes that they
	@# start, share the bytecode, also where the environment keeps Python from writing any.
	OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 2 --dist worksteal $(DRAW) $(ARGS)

test-libraries: $(CORPUS_ENV)  ## environment in .venv-corpus, then the tests that need its libraries too: minutes
	@# hydra 1.0.7, which lightly needs, brings a plugin that Python 3.11 cannot import.
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(CORPUS)/bin/python -m pytest -p no:hydra_pytest \
	    tests/patching $(addprefix --ignore=tests/patching/,fusion regions test_sequences.py test_tools.py) \
	    tests/integrations tests/ops/test_preference.py tests/benchmarks/test_networks.py
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(CORPUS)/bin/python -m pytest -p no:hydra_pytest tests/examples/test_examples.py -k fine_tuning

test-corpus: test-libraries  ## and then patch every model of the corpus and compare: two hours
	@# Interrupted, it goes on where it was. The whole, not a part that ARGS choose, writes TABLE.md and PACKAGES.md.
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(CORPUS)/bin/python -m tests.corpus $(ARGS)

$(CORPUS_ENV):
	@$(INSTALL) $(CORPUS) -r $(LIBRARIES)
	@$(INSTALL) $(CORPUS) --no-deps -r $(PACKAGES)
	@FASTLAYERS_BUILD_EXT=0 $(INSTALL) $(CORPUS) --editable .
	@rm -f $(CORPUS)/made-for-*
	@touch $@

test-tools: $(TOOLS_ENV)  ## environment in .venv-tools, then 70 tools of other people on a patched model
	PYTHONPATH=. $(TOOLS)/bin/python -m pytest tests/patching/test_tools.py $(ARGS)

$(TOOLS_ENV):
	@$(INSTALL) $(TOOLS) -r tests/tools.txt
	@FASTLAYERS_BUILD_EXT=0 $(INSTALL) $(TOOLS) --editable .
	@rm -f $(TOOLS)/made-for-*
	@touch $@

docs: $(ENV)  ## the API reference, into build/site; nothing is fetched but the environment
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

format: $(ENV)  ## let ruff format and fix what it can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# On a machine with a GPU: its own python3 and torch, nothing installed. A fastlayers/_C.so that is there is used.
fastlayers/_C.so:
	@PYTHONPATH=. $(PYTHON) -m fastlayers build

# What runs regions in C++, for the torch of that python3. Python runs them where it cannot be built.
.PHONY: regions
regions:
	@PYTHONPATH=. $(PYTHON) -m fastlayers build --regions

test-gpu: fastlayers/_C.so regions  ## the tests on a GPU, and what Triton kernels spill, with the python3 that is there
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu $(ARGS)
	PYTHONPATH=. $(PYTHON) -m pytest tests/kernels/compile_all.py $(ARGS)

# FASTLAYERS_RANDOM_SEED chooses other calls. Those that fail are kept in build/random_failures.jsonl.
test-random: fastlayers/_C.so regions  ## 10,000 random calls against float64 on a GPU: ARGS='-n 12' shares them among processes
	FASTLAYERS_RANDOM_CASES=$${FASTLAYERS_RANDOM_CASES:-10000} PYTHONPATH=. \
	    $(PYTHON) -m pytest -m gpu tests/test_random_cases.py $(ARGS)

test-sanitizer: fastlayers/_C.so regions  ## compute-sanitizer over every kernel on a GPU: ARGS='--tools memcheck --ops softmax,mul'
	PYTHONPATH=. $(PYTHON) -m tests.sanitizer $(ARGS)

test-asan: $(ENV)  ## AddressSanitizer and UBSan over the CPU kernels: minutes
	FASTLAYERS_CUDA_ARCHS= CXX='g++ -g1 -fsanitize=address,undefined -fno-sanitize=vptr' $(PY) -m fastlayers build
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 OMP_WAIT_POLICY=passive \
	    $(PY) -m pytest -n 2 -k cpu tests/contract tests/csrc/test_cpu_math.py tests/csrc/test_cpu_norms.py tests/test_random_cases.py $(ARGS)

bench: fastlayers/_C.so regions  ## the benchmarks on a GPU, with the python3 that is there
	PYTHONPATH=. $(PYTHON) -m benchmarks run $(ARGS)

bench-models: fastlayers/_C.so regions  ## whole models on a GPU, with its python3 and the model libraries (and Liger) that it has
	PYTHONPATH=. $(PYTHON) -m benchmarks models $(ARGS)

wheel: $(ENV)  ## dist/fastlayers-*-py3-none-linux_x86_64.whl, for every GPU from sm_80 on
	rm -rf build/lib* dist
	FASTLAYERS_BUILD_EXT=1 FASTLAYERS_CUDA_ARCHS='80;86;89;90;100;120+PTX' \
	    $(PY) -m pip wheel --no-deps --wheel-dir dist .

release: $(ENV)  ## check version, changelog, wheels and docs of a release; uploads nothing
	@$(PY) tools/release.py

# Each of PYTHONS has a torch of its own: make test-wheel PYTHONS='venvs/torch-2.11/bin/python venvs/newest/bin/python'
test-wheel: wheel  ## that wheel, imported and run on the CPU by each of PYTHONS
	$(PY) tests/check_wheel.py dist/*.whl $(PYTHONS)

clean:  ## remove what was built; .venv, .venv-corpus and .venv-tools stay
	rm -rf build dist fastlayers/_C.so fastlayers/_C.json fastlayers/_regions_*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fastlayers tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
