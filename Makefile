# make demo   checkpoint -> bundle -> checked bundle -> text, on a CPU
# make test   own environment, then lint, types and tests: what CI runs
# make check  the same lint, types and tests in the environment that is active
# make test-cpp   the C++ runner: what it needs, two builds, golden streams
# make test-jvm   the Kotlin runner, the same on a desktop JVM
# make test-same-stream   one stream through all runners that are built
# make gpu    the tests that need a CUDA GPU, with that machine's own torch
#
# PYTHON=python3.12           interpreter for the environment (3.11 or 3.12)
# TORCH_INDEX=https://...     extra package index, where plain pip would fetch a CUDA torch
# WORKERS=4                   processes for pytest
# PROMPT="..."                what the demo writes on from

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
WORKERS ?= 2
PROMPT ?= The old house stood at the end of the lane, and

BIN := $(VENV)/bin
# Run from the checkout without an installed package too (make check, make gpu).
RUN ?= $(PYTHON) -m

export ORT_DISABLE_TELEMETRY = 1

.PHONY: demo test check gpu lint test-cpp test-jvm test-same-stream

TOOLS := build/toolchain

demo: $(VENV)/.installed-export
	$(BIN)/edgelin export examples/demo/checkpoint -o bundles/demo --quantize int4 --force
	$(BIN)/edgelin verify bundles/demo --checkpoint examples/demo/checkpoint
	@printf '\n%s' "$(PROMPT)"
	@$(BIN)/edgelin run bundles/demo "$(PROMPT)" --max-tokens 110 --seed 1 --stats

test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory check RUN="$(BIN)/python -m"

check: lint
	$(RUN) pytest -n $(WORKERS) --dist loadscope

lint:
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

test-cpp: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python runtimes/toolchain.sh cpp
	cmake -S runtimes/cpp -B build/cpp $(CPP)
	cmake -S runtimes/cpp -B build/cpp-sanitized $(CPP) -DEDGELIN_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/cpp-sanitized --target edgelin-test -j2
	cmake --build build/cpp -j2
	build/cpp-sanitized/edgelin-test runtimes/golden build/cpp-sanitized/work

CPP = -DONNXRUNTIME_ROOT=$(CURDIR)/$(TOOLS)/onnxruntime \
	-Dnlohmann_json_DIR=$(CURDIR)/$(TOOLS)/debian/usr/share/cmake/nlohmann_json

test-jvm: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python runtimes/toolchain.sh jvm
	runtimes/jvm/build.sh edgelin.GoldenTestKt runtimes/golden build/jvm/work

test-same-stream: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/runtimes/test_same_stream.py

gpu:
	$(RUN) pytest -m gpu
	$(RUN) pytest tests/recurrences

# One environment serves both: the stamp of an extra is as old as its last installation.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$*]'
	touch $@
