# make train      train the example GPT with its layers replayed from graphs       ARGS="--compare" adds options
# make test       ruff, clang-format, pytest and GoogleTests: everything that needs no GPU
# make test-all   the same, and what takes too long for each change
# make test-gpu   the tests that need a GPU
# make sanitize   tests under sanitizers: of host code, and on a machine with GPUs of kernels       ARGS="-k chain"
# make bench      all benchmarks, those of several ranks on several GPUs                 ARGS="--quick --out DIR"
# make build      install te_graph, editable, and compile what changed
# make format     format the C++ code, fix what ruff can
# make clean      remove what was built
#
# CUDA code is compiled for the GPUs of this machine; where none is visible, the CPU ops only. TE_GRAPH_CUDA=1
# builds CUDA code anyway, TE_GRAPH_CUDA=0 none, TORCH_CUDA_ARCH_LIST=9.0 for that architecture.

PYTHON ?= python3
TORCH_VERSION ?= 2.11.0

# An environment that is active, or a Python that has torch, is used as it is. Otherwise .venv is made.
CHOOSE := import os, sys; from importlib.metadata import distributions; \
    torch = next(iter(distributions(name="torch")), None); \
    own = torch or sys.prefix != sys.base_prefix or os.path.isdir(sys.prefix + "/conda-meta"); \
    print(sys.executable if own else "$(CURDIR)/.venv/bin/python", torch.version if torch else "$(TORCH_VERSION)")
CHOICE := $(shell $(PYTHON) -c '$(CHOOSE)')
PY := $(or $(word 1,$(CHOICE)),$(error $(PYTHON) does not run: name a Python >= 3.10 with make PYTHON=...))
TORCH := torch==$(word 2,$(CHOICE))
export PATH := $(dir $(PY)):$(PATH)

# What is compiled, unless TE_GRAPH_CUDA and TORCH_CUDA_ARCH_LIST say it: kernels for the GPUs that the machine has,
# hidden from this process or not, as a build outlives the process; where it has none, the CPU ops only.
GPUS := $(if $(TORCH_CUDA_ARCH_LIST),,$(sort $(shell \
	nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+\.[0-9]+')))
ifneq ($(GPUS),)
export TORCH_CUDA_ARCH_LIST := $(GPUS)
else ifeq ($(TE_GRAPH_CUDA)$(TORCH_CUDA_ARCH_LIST),)
export TE_GRAPH_CUDA := 0
export TE_GRAPH_CUDA_REASON := no GPU is visible here
endif
# The last line of a build without CUDA code: why there is none.
REPORT = @$(PY) -c 'import runpy; note = runpy.run_path("te_graph/_build_config.py")["CPU_ONLY"]; note and print(note)'

# One stamp for each environment and setting: a build for another one is done again.
KEY := $(shell echo '$(PY) $(TORCH) $(CUDA_HOME) $(TE_GRAPH_CUDA) $(TORCH_CUDA_ARCH_LIST)' | cksum | cut -d ' ' -f 1)
BUILT := build/built-$(KEY)
CXX_FILES = $(shell find csrc tests/cpp -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
JOBS := $(or $(MAX_JOBS),$(shell nproc))

# $(call gtest,LABEL,FOLDER,OPTIONS): builds the GoogleTests in build/FOLDER, runs those with the label.
define gtest
	cmake -G Ninja -S . -B build/$(2) -DPython_EXECUTABLE=$(PY) -DTE_GRAPH_OBJECTS=$$(cat build/objects) $(3) $(CMAKE_ARGS)
	cmake --build build/$(2) --parallel $(JOBS)
	ctest --test-dir build/$(2) -L '^$(1)$$' --output-on-failure --no-tests=error
endef

.PHONY: help build train test test-all test-gpu sanitize sanitize-kernels bench format clean tools lint-tools
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

$(CURDIR)/.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

$(BUILT): $(PY) pyproject.toml setup.py $(shell find csrc)
	$(PY) -m pip install '$(TORCH)' 'setuptools>=77' ninja
	@echo 'Compiling te_graph against $(TORCH): some minutes, seconds when little has changed'
	$(PY) -m pip install --quiet --no-build-isolation --editable .
	@$(PY) -m te_graph
	@rm -f build/built-* && touch $@

build: $(BUILT)
	$(REPORT)

train: $(BUILT)
	$(PY) examples/train_gpt.py $(ARGS)
	$(REPORT)

test: TESTS := not gpu and not full
test-all: TESTS := not gpu
test-all: CMAKE_ARGS += -DTE_GRAPH_SANITIZE=ON
test test-all: $(BUILT) tools lint-tools
	$(PY) -m ruff check .
	clang-format --dry-run -Werror $(CXX_FILES)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --maxprocesses 8 -m '$(TESTS)' $(ARGS)
	$(call gtest,host,gtest)
	$(REPORT)

test-gpu: $(BUILT) tools
	$(PY) -m pytest -m gpu $(ARGS)
	if [ $$($(PY) -c 'import torch; print(torch.cuda.device_count())') -eq 1 ]; then \
		TE_GRAPH_TEST_SHARE_GPU=1 $(PY) -m pytest -m multi_gpu $(ARGS); fi
	$(call gtest,gpu,gtest)

# Flags that compilers and linkers read from there. Why these, and what is put before the process: CMakeLists.txt.
SANITIZERS := @$(CURDIR)/tests/cpp/sanitizers.txt
UNDER_SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	CUDA_VISIBLE_DEVICES= ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1
TORTURE := $(addprefix tests/,programs multi_tensor fp8 collectives recorder $(addprefix graphs/,\
	chain functions gradients guards hazards stress capture/test_outputs.py capture/test_exhausted.py \
	capture/test_input_uses.py capture/test_class_programs.py))
TIMED := tests/graphs/functions/test_graphed_fn_guard.py::test_a_thousand_tensors_are_checked_in_some_tens_of_microseconds
TSAN := build/sanitize-threads

sanitize: $(BUILT) tools
	TE_GRAPH_CUDA=0 CFLAGS='$(SANITIZERS)' LDFLAGS='$(SANITIZERS)' $(PY) setup.py --quiet \
		build_py --build-lib build/sanitize build_ext --build-lib build/sanitize --build-temp build/sanitize/objects
	cd build/sanitize && $(UNDER_SANITIZERS) $(PY) -m pytest -n $(JOBS) -m 'not gpu' \
		--deselect $(TIMED) $(addprefix $(CURDIR)/,$(TORTURE)) $(ARGS)
	$(call gtest,host,sanitize-gtest,-DTE_GRAPH_SANITIZE=ON)
	TE_GRAPH_CUDA=0 cmake -G Ninja -S . -B $(TSAN) -DPython_EXECUTABLE=$(PY) -DCMAKE_CXX_FLAGS='-fsanitize=thread -g1'
	cmake --build $(TSAN) --parallel $(JOBS) --target te_graph_host_tests && $(TSAN)/te_graph_host_tests --gtest_brief=1
	if nvidia-smi -L >/dev/null 2>&1; then $(MAKE) --no-print-directory sanitize-kernels; fi

# Without tests of 2^31 elements and of all bit patterns or sizes, for kernels take a hundred times as long here, and
# without those of ranks that are late or wrong, which end by time-outs.
KERNEL_TESTS := -*TwoToThe31*:*EveryBitPattern*:*EveryPairModeSize*:*AllSizes*:*AMebibyte*:CollectivesFailure*:*Races*
# On several GPUs their collectives, too; torch and NCCL ask for kernels that they have not, which is no error. To
# initcheck what a peer has written is not written.
CHECK = compute-sanitizer --tool $$check --error-exitcode 1 --target-processes all --report-api-errors no

sanitize-kernels: $(BUILT) tools
	$(call gtest,gpu,gtest)
	for check in memcheck racecheck synccheck initcheck; do \
		$(CHECK) build/gtest/te_graph_device_tests --gtest_brief=1 --gtest_filter='$(KERNEL_TESTS)' || exit 1; \
		if [ $$(nvidia-smi -L | wc -l) -gt 1 ] && [ $$check != initcheck ]; then \
			$(CHECK) $(PY) -m pytest -m multi_gpu tests/collectives/test_collectives_pool.py || exit 1; fi; \
	done

bench: $(BUILT)
	$(PY) benchmarks/bench_graphed.py $(ARGS)
	$(PY) benchmarks/bench_graphed_sweep.py $(ARGS)
	$(PY) benchmarks/bench_multi_tensor.py $(ARGS)
	$(PY) benchmarks/bench_fp8.py $(ARGS)
	$(PY) benchmarks/bench_fp8_linear.py $(ARGS)
	$(PY) benchmarks/bench_fp8_layers.py $(ARGS)
	$(PY) benchmarks/bench_fp8_training.py $(ARGS)
	$(PY) benchmarks/bench_flags.py $(ARGS)
	if [ $$($(PY) -c 'import torch; print(torch.cuda.device_count())') -gt 1 ]; then \
		$(PY) benchmarks/bench_collectives.py $(ARGS); \
		$(PY) benchmarks/bench_flat.py $(ARGS); fi

format: $(BUILT) lint-tools
	clang-format -i $(CXX_FILES)
	$(PY) -m ruff check --fix .

# te_graph is installed by now, so pip only adds what these extras name; nothing is fetched when all is there. torch
# is named, too: torchvision, which timm needs, would bring its own.
tools: $(BUILT)
	@$(PY) -m pip install --quiet '$(TORCH)' 'te_graph[test,compat]'
	@cmake --version >/dev/null 2>&1 || $(PY) -m pip install --quiet cmake
lint-tools: $(BUILT)
	@$(PY) -m pip install --quiet 'te_graph[lint]'

clean:
	rm -rf build dist te_graph.egg-info te_graph/_C.*.so te_graph/_build_config.py
