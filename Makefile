# Every target makes and uses .venv/ at the root; PYTHON=python3.12 make ... picks another interpreter (3.11 or later).
PYTHON ?= python3
TESTED := torch==2.13.0
TORCH ?= $(TESTED)
BIN := .venv/bin
LOCK := $(if $(filter $(TESTED),$(TORCH)),--constraint requirements.lock)
READY := .venv/.ready
WHOLE := not slow and not gpu and not slurm and not postgresql
FAST := $(WHOLE) and not integration
SHARED := -n logical --dist worksteal

APPROXIMATION := mxnorm.fig02_approximation mxnorm.theorem1_bounds recipe.cast_quality recipe.formats_table

# Container images set it. Then each process compiles the package anew, and each pytest worker all tests: 6 s of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart approximation test test-gpu check bench soak figures pages claims report docs dashboard lock
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

quickstart: $(READY)  ## train a small Llama four ways and compare them: RMSNorm and MXNorm, bf16 and MXFP8
	$(BIN)/python -m mxstudy +sweep=quickstart wait=true

approximation: $(READY)  ## measure MXNorm, the casts and the FP4 recipes on random tensors: tables, and figures/ (a minute)
	$(BIN)/python -m mxstudy +experiment=approximation_recipes
	@for figure in $(APPROXIMATION); do $(BIN)/python -m analysis.$$figure --runs runs/approximation_recipes || exit 1; done

test: $(READY)  ## run all tests except those marked slow, slurm, postgresql or gpu
	$(BIN)/python -m pytest -q $(SHARED) -m "$(WHOLE)" --durations=10

check: $(READY)  ## check format, lint and types, and run the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(BIN)/mypy > .venv/types.log 2>&1 & types=$$!; $(BIN)/python -m pytest -q $(SHARED) -m "$(FAST)"; tests=$$?; \
	  wait $$types; types=$$?; cat .venv/types.log; exit $$((tests + types))

test-gpu: $(READY)  ## run the tests that need GPUs, and list the skipped ones (without a GPU: all) with reasons
	@$(BIN)/python -c 'import torch; n = torch.cuda.device_count(); print(f"GPUs: {n}" if n else "no GPU found: every test that needs one is skipped")'
	$(BIN)/python -m pytest -q -rfEs -m gpu

bench: $(READY)  ## list the benchmarks, or run one: NAME=kernels ARGS="--seconds 300"
ifdef NAME
	$(BIN)/python -m benchmarks.$(NAME) $(ARGS)
else
	@grep -l '^ *python -m benchmarks' benchmarks/*.py | while read file; do \
	  printf '  %-18s%s\n' $$(basename $$file .py) "$$(sed -n '1s/^"""//p' $$file)"; done
endif

SECONDS ?= 600
SEED ?= 0
soak: $(READY)  ## kill commands at random, fill their disks, compare what they leave: SECONDS=600 SEED=0 ARGS="--only preparation"
	$(BIN)/python -m benchmarks.soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

figures: $(READY)  ## draw every figure that results/ has data for, into figures/published; NAME=... draws one
	$(BIN)/python -m analysis.figures $(NAME)

pages: $(READY)  ## write the numbers on the pages of results/ anew from the tables beside them, and their images
	$(BIN)/python -m analysis.pages
	$(BIN)/python -m analysis.figures --pages

claims: $(READY)  ## judge what the papers claim by the tables in results/: results/claims.md and .json, and README's sums
	$(BIN)/python -m analysis.ledger.page

RUNS ?= runs/quickstart
report: $(READY)  ## write an HTML page about a set of runs: RUNS=runs/quickstart
	$(BIN)/python -m analysis.report --runs $(RUNS)

docs: $(READY)  ## build README, docs/ and the pages of results/ as a site, site/index.html; a warning is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(LOCK) --editable '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d site/.doctrees . site

dashboard: $(READY)  ## serve MLflow on mlflow.db at http://127.0.0.1:5000
	MLFLOW_DISABLE_TELEMETRY=true $(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

WHEELS ?= --torch-backend cpu
lock:  ## write requirements.lock anew, with as few changes as pyproject.toml allows; ARGS=--upgrade takes the newest
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	echo $(TESTED)+cpu | $(BIN)/uv pip compile --quiet --python-version 3.11 $(WHEELS) $(ARGS) --extra dev --extra docs \
	  --no-annotate --custom-compile-command "make lock" --output-file requirements.lock pyproject.toml -
	sed -i 's/+cpu$$//' requirements.lock

# Install torch first and pinned, so that no other package selects its build. With another torch than the tested one, pip
# takes the newest packages that pyproject.toml allows, in place of the locked ones.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11; try make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(LOCK) --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true  # pip compiles on one core, for a minute and a half
	@touch $(READY)
