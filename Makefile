# Two commands do everything on a fresh machine: `make demo` and `make test`. Each builds .venv itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test lint type unit docs pages models-table pipelines-table diagrams tree package test-isa test-slow test-fuzz test-gpu test-ray test-browser test-foreign test-versions test-mutants reliability reliability-gpu bench bench-gpu clean

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: lint type unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(PYTEST) -n 2 --dist worksteal

# What promises equal bits, with the kernels of a processor that has little: MKL's depend on where in a cache line a
# weight begins there, as on some that have more, and all round otherwise. On a processor of another maker than Intel
# MKL does as it likes.
# Where bits depend on kernels most; ISA="tests/cache tests/compose tests/hooks tests/offload" is all that promises them.
ISA ?= tests/cache/test_on_pipelines.py tests/compose/test_matrix.py tests/offload/test_compressed.py \
	tests/offload/test_device.py tests/offload/test_layout.py tests/offload/test_offload.py
test-isa: export MKL_ENABLE_INSTRUCTIONS = SSE4_2
test-isa: export ONEDNN_MAX_CPU_ISA = AVX2
test-isa: export ATEN_CPU_CAPABILITY = avx2
test-isa: $(READY)
	$(PYTEST) -n 2 $(ISA)

test-slow: $(READY)
	$(BIN)/pip install --quiet --editable '.[slow]'
	$(PYTEST) -m 'slow and not gpu'

# Random inputs, for FUZZ_SECONDS in all; a failure says with which FUZZ_SEED and FUZZ_CASE it is made again.
test-fuzz: export FUZZ_SECONDS ?= 300
test-fuzz: $(READY)
	$(PYTEST) -m fuzz tests/fuzz $(ARGS)

test-gpu: $(READY)
	$(PYTEST) -m gpu

test-ray: $(READY)
	$(BIN)/pip install --quiet --editable '.[ray]'
	$(PYTEST) -m ray

test-browser: $(READY)
	$(BIN)/pip install --quiet --editable '.[browser]'
	$(PYTEST) -m browser

# The originals of other people's models: FOREIGN is a folder of checkouts, each named owner+name.
# Their packages come alone, without what they ask for: torch stays the build that it is.
test-foreign: $(READY)
	@test -n "$(FOREIGN)" || { echo 'make test-foreign FOREIGN=folder: a folder of checkouts is needed.' >&2; exit 2; }
	$(BIN)/pip install --quiet --no-deps einops timm x-transformers einx loguru frozendict torch-einops-utils einops-exts easydict ftfy
	SAMOVAR_FOREIGN="$(FOREIGN)" $(PYTEST) -m foreign tests/foreign

# The oldest versions of diffusers, transformers and the rest that pyproject.toml allows, then the newest, in environments
# under .envs; ARGS=torch==2.14.1 tries another torch, a download of gigabytes. Writes docs/reference/versions.md.
test-versions: $(READY)
	$(BIN)/python benchmarks/versions.py $(ARGS) --write docs/reference/versions.md

# Known faults, put into a copy of the source one at a time: the tests must find them. Takes long: for each fault, tests of
# its room run until one fails.
# ARGS="--room cache -j 2" tries those of one room, two at a time; ARGS="--only ID" tries one.
test-mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(ARGS)

# What would be published: a source distribution and a wheel, in dist/.
package: $(READY)
	rm -rf dist
	$(BIN)/python -m hatchling build

# All of docs/benchmarks/reliability.md for a CPU, with its figures; takes about half an hour.
reliability: $(READY)
	$(BIN)/pip install --quiet --editable '.[slow]'
	$(BIN)/python benchmarks/reliability.py --write docs/benchmarks/reliability.md

# Its rows for a GPU; takes about five minutes.
reliability-gpu: $(READY)
	$(BIN)/python benchmarks/reliability.py --device cuda --write docs/benchmarks/reliability.md

# The site, into out/site; a broken link or name is an error.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(READY)
	PYTHONPATH=src:. $(BIN)/mkdocs build --strict --quiet
	@echo 'The site is in out/site: open out/site/index.html'

# After a change of what counts as time-only, `PYTHONPATH=src:tests .venv/bin/python -m zoo.time_shares` first.
models-table: $(READY)
	PYTHONPATH=tests $(BIN)/python -m zoo.table > docs/reference/models.md

# Every pipeline of diffusers, tried: takes about ten minutes.
pipelines-table: $(READY)
	PYTHONPATH=src:tests $(BIN)/python -m pipelines.table

# The parts of pages that are made from code and results. They are committed; a test holds that they are current.
pages: $(READY)
	PYTHONPATH=src:. $(BIN)/python -m docs.generate.pages

# What shows results and is in the repository: diagrams, plots, and the table at the top of the README.
diagrams: $(READY)
	PYTHONPATH=src:. $(BIN)/python -m docs.generate.diagrams
	PYTHONPATH=src:. $(BIN)/python -m docs.generate.plots
	PYTHONPATH=src:. $(BIN)/python -m docs.generate.tables

# Every source file with its purpose.
tree: $(READY)
	@PYTHONPATH=src:. $(BIN)/python -m docs.generate.code

bench: $(READY)
	$(BIN)/python benchmarks/hooks.py --json benchmarks/results/hooks.json
	$(BIN)/python benchmarks/builtin.py --json benchmarks/results/builtin.json
	$(BIN)/python benchmarks/parallel.py --json benchmarks/results/parallel.json
	$(BIN)/python benchmarks/server.py --json benchmarks/results/server.json
	PYTHONPATH=src:tests $(BIN)/python benchmarks/quantised_quality.py --json benchmarks/results/quantised_quality.json

# On a machine with a GPU; cache-dit, if it is installed, takes part.
bench-gpu: $(READY)
	$(BIN)/python benchmarks/gpu_cache.py --json benchmarks/results/gpu_cache.json
	$(BIN)/python benchmarks/gpu_offload.py --json benchmarks/results/gpu_offload.json
	$(BIN)/python benchmarks/gpu_cards.py --json benchmarks/results/gpu_cards.json
	$(BIN)/python benchmarks/gpu_coding.py --json benchmarks/results/gpu_coding.json
	$(BIN)/python benchmarks/gpu_compose.py --json benchmarks/results/gpu_compose.json
	$(BIN)/python benchmarks/gpu_lora.py --json benchmarks/results/gpu_lora.json
	$(BIN)/python benchmarks/gpu_serving.py --json benchmarks/results/gpu_serving.json

clean:
	rm -rf $(VENV) .envs dist out .mypy_cache .ruff_cache .pytest_cache

# torch comes first and alone: a range asked for by another package would take another build of it.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@
