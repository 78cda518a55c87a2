# SPDX-License-Identifier: Apache-2.0
# `make train` trains a small model on this machine, `make test` checks everything, `make fuzz` tries odd inputs. All set up
# .venv from a bare python3 first; nothing is set up twice. `make docs` builds the pages into site/.

VENV := .venv
BIN := $(VENV)/bin
RUN := $(VENV)/.set-up-to-run
DEV := $(VENV)/.set-up-to-develop
DOCS := $(VENV)/.set-up-to-write
DIR ?= runs/tiny_python
# TensorFlow Text, which SeqIO needs, has no wheels for 3.14.
PROBE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
FIND_PYTHON = for p in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	if "$$p" -c '$(PROBE)' >/dev/null 2>&1; then command -v "$$p"; break; fi; done

# Compiling its modules anew would be a third of each start of the program.
unexport PYTHONDONTWRITEBYTECODE

EXAMPLES ?= 2000
.PHONY: train test test-quick fuzz lint style docs clean

train: $(RUN)
	$(BIN)/paxlike --fdl_config=TinyPython --job_log_dir="$(DIR)"
	$(BIN)/paxlike-plot "$(DIR)"
	@echo "TensorBoard files: $(DIR)/summaries, numbers: $(DIR)/metrics.jsonl"

# Four processes keep two cores busy: most tests compile, which takes one, many wait for programs.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadscope

test: lint
	$(PYTEST)

test-quick: style
	$(PYTEST) -m "not slow"

# So many new inputs for each campaign of those marked fuzz, wherever they stand: about an hour.
fuzz: $(DEV)
	PAXLIKE_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q -m fuzz tests

# Strict: a warning, as of a link that leads nowhere, is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: style
	$(BIN)/pyright

style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# A stamp comes last, so that a set-up that was cut off starts anew. uv resolves and unpacks this
# stack several times faster than pip, which does it all where uv cannot be had. uv is to trust the
# certificates that the system trusts, such as those of a proxy.
INSTALL = VIRTUAL_ENV="$(CURDIR)/$(VENV)" UV_SYSTEM_CERTS=1 $(BIN)/uv pip install --quiet -e '.[$(1)]' \
	|| $(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary -e '.[$(1)]'

$(RUN): pyproject.toml
	@python="$$($(FIND_PYTHON))"; \
	if [ -z "$$python" ]; then \
	  echo "paxlike needs Python 3.11, 3.12 or 3.13 with venv (Debian: apt install python3-venv);" \
	    "name one with 'make PYTHON=/path/to/python3 ...'." >&2; exit 2; fi; \
	echo "setting up $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --prefer-binary uv || true
	@$(call INSTALL,plot)
	@touch $@

# Hugging Face's transformers and torch, which tests compare with, are most of it.
$(DEV): $(RUN)
	@echo "setting up what tests need"
	@$(call INSTALL,dev)
	@touch $@

$(DOCS): $(RUN)
	@echo "setting up what the pages need"
	@$(call INSTALL,docs)
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache
