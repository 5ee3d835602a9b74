# Two commands: `make lab` and `make test`. Each sets up what it needs first.
PYTHON ?= $(shell for p in .venv/bin/python python3.12 python3.11 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
    2>/dev/null && echo $$p && exit; done; echo python3)
PORT ?= 8888
BARE = @PYTHONPATH=shared "$(PYTHON)" -m
# Makes .venv whole, then runs a command of `kvlab` in it.
KVLAB = $(BARE) kvlab.setup

.PHONY: help lab setup test test-python test-gpu doctor pins notebooks clean clean-cache

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /    make \1\t/p' Makefile | expand -t 24

lab: ## set up what is missing and open JupyterLab at the course
	$(KVLAB) lab --port $(PORT)

setup: ## the same without the server, for use inside a Jupyter that runs already
	$(KVLAB) setup

test: ## set up what is missing and run all tests
	$(KVLAB) test

test-python: ## run the packages' tests under another Python: PYTHON=/path/to/python3.12
	@.venv/bin/python -m kvlab.cli test-python "$(PYTHON)"

# Not by way of .venv: on a rented GPU machine with torch this is all that has to be there.
test-gpu: ## run the kernels' tests with a Python that has torch, triton, safetensors and pytest
	@for python in "$(PYTHON)" python3 python; do \
	    if "$$python" -c 'import torch, triton, numpy, safetensors, pytest' 2>/dev/null; then \
	        PYTHONPATH=shared exec "$$python" -m pytest -rs tests/kernels; \
	    fi; \
	done; \
	echo "No Python here has torch, triton, numpy, safetensors and pytest. Install them"; \
	echo "(torch 2.11 or later for CUDA brings triton), or name a Python that has them:"; \
	echo "    make test-gpu PYTHON=/path/to/python"; \
	exit 1

doctor: ## what can this machine run, and why not the rest
	$(BARE) kvlab.doctor

pins: ## resolve requirements/*.in into the pins files
	$(KVLAB) pins

notebooks: ## execute chapters and solutions, and make the labs from the solutions
	$(KVLAB) notebooks

clean: ## remove .venv and leftovers in the checkout; my/ stays
	$(BARE) kvlab.clean

clean-cache: ## remove the cache folder with engines and models, shared by all clones
	$(BARE) kvlab.clean cache
