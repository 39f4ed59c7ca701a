# Each target does all its own set-up, from a machine that has python3 with venv, a C++ compiler and make.
# Everything it makes lies in .venv and build; `make clean` removes both.
PYTHON ?= python3
JOBS ?= 2
FUZZ_SECONDS ?= 20

BIN := .venv/bin
CMAKE = $(BIN)/cmake -G Ninja -S . -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DLIGHTCC_TESTS=ON
BUILD = $(BIN)/cmake --build
SOURCES := $(shell find csrc lightcc setup.py pyproject.toml CMakeLists.txt README.md \
             -type f ! -name '*.pyc' ! -name '*.so' 2>/dev/null)
# ThreadSanitizer's memory map does not fit every kernel's address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo test unit bench lint wheel sanitize fuzz clean gtest
help:
	@echo 'make demo       digits with PyTorch on two ranks, compared with one rank'
	@echo 'make test       C++ unit tests, then Python tests'
	@echo 'make unit       C++ unit tests alone'
	@echo 'make bench      a short benchmark'
	@echo 'make lint       style, layers, generated docs'
	@echo 'make sanitize   C++ unit tests under ASan + UBSan, then TSan'
	@echo 'make fuzz       every fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make wheel      a manylinux wheel in dist, and the glibc it needs'
	@echo 'make clean      removes what these made'

demo: build/installed
	$(BIN)/lightccrun -np 2 $(BIN)/python examples/pytorch_digits.py --output build/demo
	$(BIN)/python examples/pytorch_digits.py --output build/demo --reference

# From tests, so that `import lightcc` finds the installed package and not the source folder, which has no core.
test: unit build/installed
	cd tests && ../$(BIN)/python -m pytest python regressions -q

unit: build/cmake/build.ninja
	$(BUILD) build/cmake --target unit_tests --parallel $(JOBS)
	build/cmake/unit_tests --gtest_brief=1

bench: build/installed
	$(BIN)/python bench/smoke.py

lint: build/cmake/build.ninja
	$(BIN)/ruff check .
	$(PYTHON) .ci/layers.py
	! LC_ALL=C.UTF-8 grep -rnE '^.{121,}' csrc tests tools --include='*.cc' --include='*.h'
	$(BUILD) build/cmake --target knobs --parallel $(JOBS)
	build/cmake/knobs | diff - docs/knobs.md || { echo 'docs/knobs.md is old: build/cmake/knobs > docs/knobs.md'; false; }

sanitize: build/address/build.ninja build/thread/build.ninja
	$(BUILD) build/address --target unit_tests --parallel $(JOBS)
	UBSAN_OPTIONS=print_stacktrace=1 build/address/unit_tests --gtest_brief=1
	$(BUILD) build/thread --target unit_tests --parallel $(JOBS)
	$(NO_ASLR) build/thread/unit_tests --gtest_brief=1

fuzz: build/address/build.ninja
	$(BUILD) build/address --parallel $(JOBS)
	@for target in build/address/*_fuzz; do \
	  corpus=tests/fuzz/corpus/$$(basename $$target); \
	  $$target -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/ $$([ -d $$corpus ] && echo $$corpus) || exit 1; \
	done

wheel: build/packages
	rm -rf build/wheel dist
	$(BIN)/pip wheel -q --no-deps --wheel-dir build/wheel .
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(PYTHON) .ci/symbols.py dist/*.whl
	@ls dist/*.whl

clean:
	rm -rf .venv build dist *.egg-info

# What the targets above stand on.
build/packages: .ci/requirements.txt
	mkdir -p build
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -r .ci/requirements.txt
	touch $@

# build/cmake is also where setup.py builds, so the tests run the very objects that are installed.
build/cmake/build.ninja: build/packages | gtest
	$(CMAKE) -B build/cmake

build/installed: build/packages build/cmake/build.ninja $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation .
	touch $@

build/address/build.ninja build/thread/build.ninja: build/%/build.ninja: build/packages | gtest
	$(CMAKE) -B build/$* -DLIGHTCC_SANITIZE=$*

gtest:
	@CXX="$(CXX)" .ci/gtest
