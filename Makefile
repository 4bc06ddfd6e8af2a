# make demo   checkpoint -> bundle -> checked bundle -> text, on a CPU
# make test   own environment, then lint, types and tests: what CI runs
# make test-full  all of that, and what is too long for CI: more cells of the matrix, more fuzz,
#             old and new versions of onnxruntime
# make check  the same lint, types and tests in the environment that is active
# make demo-web   the demo page, with the demo model, on http://127.0.0.1:8080
# make test-web   the runner for browsers and Node: its npm packages, golden streams, Chromium
# make bench-web  tokens a second in headless Chromium, beside onnxruntime in Node
# make bench-runtimes  tokens a second of the demo model in every runner that is built
# make test-cpp   the C++ runner: what it needs, two builds, golden streams
# make test-jvm   the Kotlin runner, the same on a desktop JVM
# make test-android   resources and sources of the Android demo
# make test-same-stream   one stream, and what is refused, through all runners that are built
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

.PHONY: demo demo-web test-web bench-web bench-runtimes test test-full check gpu lint test-cpp test-jvm test-android test-same-stream

TOOLS := build/toolchain
WEB := runtimes/web
CHROMIUM ?= /usr/bin/chromium

demo: $(VENV)/.installed-export
	$(BIN)/edgelin export examples/demo/checkpoint -o bundles/demo --quantize int4 --force
	$(BIN)/edgelin verify bundles/demo --checkpoint examples/demo/checkpoint --record
	@printf '\n%s' "$(PROMPT)"
	@$(BIN)/edgelin run bundles/demo "$(PROMPT)" --max-tokens 110 --seed 1 --stats

test: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory check RUN="$(BIN)/python -m"

test-full: $(VENV)/.installed-dev
	$(MAKE) --no-print-directory check RUN="$(BIN)/python -m" PYTEST=--full

check: lint
	$(RUN) pytest -n $(WORKERS) --dist loadscope $(PYTEST)

lint:
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy

demo-web: $(VENV)/.installed-export $(WEB)/dist
	test -d bundles/web || \
		$(BIN)/edgelin export examples/demo/checkpoint -o bundles/web --quantize none --portable
	node $(WEB)/demo/build.mjs --serve bundles/web

test-web: $(WEB)/dist $(CHROMIUM)
	cd $(WEB) && CHROMIUM=$(CHROMIUM) npm test --silent

# Of both: FIRST="chrt -r 10" keeps other processes from interrupting it.
bench-web: $(VENV)/.installed-export $(WEB)/dist $(CHROMIUM)
	$(BIN)/python benchmarks/web/model.py build/bench-web
	CHROMIUM=$(CHROMIUM) $(FIRST) node benchmarks/web/decode.mjs build/bench-web
	$(BIN)/python benchmarks/web/products.py build/products
	$(FIRST) node benchmarks/web/products.mjs build/products

bench-runtimes: $(VENV)/.installed-export $(WEB)/dist $(CHROMIUM)
	test -d build/bench-runtimes || $(BIN)/edgelin export examples/demo/checkpoint \
		-o build/bench-runtimes --quantize int4 --portable
	CHROMIUM=$(CHROMIUM) $(FIRST) $(BIN)/python benchmarks/runtimes.py build/bench-runtimes

$(CHROMIUM):
	apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null

$(WEB)/dist: $(WEB)/node_modules/.package-lock.json $(wildcard $(WEB)/src/*.ts $(WEB)/demo/*.ts)
	cd $(WEB) && npm run build --silent && touch dist

$(WEB)/node_modules/.package-lock.json: $(WEB)/package-lock.json
	cd $(WEB) && npm ci --silent --no-audit --no-fund

test-cpp: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python runtimes/toolchain.sh cpp
	cmake -S runtimes/cpp -B build/cpp $(CPP)
	cmake -S runtimes/cpp -B build/cpp-sanitized $(CPP) -DEDGELIN_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/cpp-sanitized --target edgelin-test -j2
	cmake --build build/cpp -j2
	build/cpp-sanitized/edgelin-test runtimes/golden build/cpp-sanitized/work
	$(BIN)/python -m pytest tests/runtimes/test_c_abi.py

CPP = -DONNXRUNTIME_ROOT=$(CURDIR)/$(TOOLS)/onnxruntime \
	-Dnlohmann_json_DIR=$(CURDIR)/$(TOOLS)/debian/usr/share/cmake/nlohmann_json

test-jvm: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python runtimes/toolchain.sh jvm
	runtimes/jvm/build.sh edgelin.GoldenTestKt runtimes/golden build/jvm/work
	$(BIN)/python -m pytest tests/runtimes/test_jvm_tokenizer.py

test-android: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python runtimes/toolchain.sh android
	android_demo/check.sh

test-same-stream: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/runtimes/test_same_stream.py tests/runtimes/test_refusals.py

gpu:
	$(RUN) pytest -m gpu
	$(RUN) pytest tests/recurrences

# One environment serves both: the stamp of an extra is as old as its last installation.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -e '.[$*]'
	touch $@
