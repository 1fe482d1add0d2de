# Two commands: `make demo` and `make test`. Each sets up what it needs first; `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
CHECKED := vllm_ktx attention_backends kv_quant offload benchmarks tests scripts setup.py

# Nothing here talks to a model hub or reports usage.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: help install demo test check lint format typecheck models native clean distclean

help:
	@echo "make install    .venv with vLLM for this machine (CPU or CUDA), the development tools and KTX itself"
	@echo "make demo       install, then serve a prompt through KTX and print what it did"
	@echo "make test       install, prepare the models, then every check and the tests"
	@echo "make check      lint, format and types only"
	@echo "make models     prepare the test models"
	@echo "make native     recompile the CPU kernels in place"
	@echo "make clean      remove build products; distclean removes .venv too"

install:
	@$(PYTHON) scripts/bootstrap.py

demo: install
	@$(PY) -m benchmarks.demo

models: install
	@$(PY) -m benchmarks.models all

test: models check
	@$(PY) -m pytest $(PYTEST_ARGS)

check: lint typecheck

lint: install
	@$(PY) -m ruff check $(CHECKED)
	@$(PY) -m ruff format --check $(CHECKED)

format: install
	@$(PY) -m ruff check --fix $(CHECKED)
	@$(PY) -m ruff format $(CHECKED)

# The four folders are one package only once installed; mypy gets the same tree as links.
typecheck: install
	@mkdir -p build/typing/vllm_ktx
	@ln -sfn ../../../vllm_ktx/__init__.py build/typing/vllm_ktx/__init__.py
	@for folder in attention_backends kv_quant offload; do ln -sfn ../../../$$folder build/typing/vllm_ktx/$$folder; done
	@$(PY) -m mypy

native:
	@$(PY) setup.py --quiet build_ext --inplace

clean:
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	@rm -f attention_backends/cpu/_native*.so $(VENV)/ktx-stamps/vllm-ktx-*

distclean: clean
	@rm -rf $(VENV)
