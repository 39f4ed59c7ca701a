# Each target does all its own set-up, from a machine that has python3 with venv, a C++ compiler and make
# (.ci/environments.mk). Everything it makes lies in .venv and build; `make clean` removes both.
PYTHON ?= python3
JOBS ?= 2
FUZZ_SECONDS ?= 20
# ON: several files are compiled at once, which takes half the time; OFF where they are worked on.
UNITY ?= ON

BIN := .venv/bin
CMAKE = $(BIN)/cmake -G Ninja -S . -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DLIGHTCC_TESTS=ON -DCMAKE_UNITY_BUILD=$(UNITY)
BUILD = $(BIN)/cmake --build $(1) --parallel $(JOBS) --target
# TensorFlow 2.13 has no wheels for Python 3.12 and later, 2.21 none for 3.9.
TENSORFLOWS := $(shell $(PYTHON) -c 'from sys import version_info as v; \
                 print("2.13.0" * (v < (3, 12)), "2.21.0" * (v >= (3, 10)))')
NEWEST := $(lastword $(TENSORFLOWS))
OLDEST := $(filter-out $(NEWEST),$(TENSORFLOWS))

.PHONY: help demo docs harp pytest test test-all test-rest clusters trainers jax unit unit-tests bench elastic-soak gpu-test gpu-bench gpu-compression lint wheel aarch64 aarch64-tests sanitize sanitize-build fuzz clean packages-build packages-tests packages-aarch64
help:
	@echo 'make demo       digits with PyTorch on two ranks, compared with one rank'
	@echo 'make test       C++ tests, then Python tests with PyTorch and TensorFlow, on one host and several'
	@echo 'make test-all   that, and what it leaves out: slow tests, other numbers of ranks, NCCLs, NVRTCs, TensorFlow $(OLDEST), sanitizers, fuzzers'
	@echo 'make harp       HARP alone: libharp.so, NCCL'\''s plugin and the programs, in build/cmake; PREFIX=/usr/local installs them'
	@echo 'make unit       C++ tests alone; FILTER=GoogleTest'\''s filter: some of them'
	@echo 'make pytest     FILES="python/test_objects.py ..." from tests, with PyTorch; NP=2: on two ranks; WITH=tensorflow'
	@echo 'make clusters   the tests of Ray, Spark and Kubernetes, each in an environment of its own'
	@echo 'make trainers   the tests of Accelerate, Transformers and Lightning, in an environment of their own'
	@echo 'make jax        the tests of JAX, in an environment of their own'
	@echo 'make bench      a short benchmark'
	@echo 'make elastic-soak  TURNS=10 times each: elastic jobs whose hosts come, go and fail'
	@echo 'make gpu-test   with a GPU, and PyTorch, pytest and CuPy in $(PYTHON): all that runs there'
	@echo 'make gpu-bench  with a GPU, and PyTorch in $(PYTHON): how fast it is there'
	@echo 'make gpu-compression  with a GPU, nvcc, and PyTorch in $(PYTHON): the codecs'\'' kernels'
	@echo 'make lint       style, types, layers, generated docs'
	@echo 'make docs       the documentation as a site, in build/site; links and anchors are checked'
	@echo 'make sanitize   C++ unit tests under ASan + UBSan, then TSan'
	@echo 'make aarch64    the libraries for aarch64, and C++ tests on an emulated one'
	@echo 'make fuzz       every fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make wheel      a manylinux wheel in dist, and the glibc it needs'
	@echo 'make clean      removes what these made'

demo: build/installed
	$(BIN)/lightccrun -np 2 $(BIN)/python examples/pytorch_digits.py --output build/demo
	$(BIN)/python examples/pytorch_digits.py --output build/demo --reference

# From tests, so that `import lightcc` finds the installed package and not the source folder, which has no core. Called with
# the numbers of ranks, 0 for tests that are not on ranks, and what is meant: folders, and labels (pyproject.toml).
PYTEST = -m pytest -q
WITH_TORCH = cd tests && LIGHTCC_TEST_FRAMEWORKS=numpy,torch LIGHTCC_TEST_SIZES=$(1) ../$(BIN)/python $(PYTEST) $(2)
WITH_TENSORFLOW = cd tests && LIGHTCC_TEST_FRAMEWORKS=tensorflow,tensorflow-function,tensorflow-v1 LIGHTCC_TEST_SIZES=$(2) \
  ../build/tensorflow-$(1)/bin/python $(PYTEST) $(3)
# More than there are cores, since tests that wait for ranks are most; hosts come first, as they wait longest.
SIDE_BY_SIDE = -n $(1) --dist loadfile --no-loadscope-reorder
# Called with two of these, or of what runs several one after the other, which run at a time: ranks often wait for each other.
ONE_BY_ONE = { ($(1)) && ($(2))$(if $(3), && ($(3))); }
BOTH = ($(1)) >build/beside.log 2>&1 & ($(2)); last=$$?; wait $$!; first=$$?; cat build/beside.log; exit $$((first + last))

test: unit build/installed build/mpi build/tensorflow-$(NEWEST)/installed
	$(call WITH_TORCH,0,$(call SIDE_BY_SIDE,4) multihost python regressions -m 'not slow')
	$(call WITH_TENSORFLOW,$(NEWEST),0,$(call SIDE_BY_SIDE,4) python -m 'tensorflow and not slow')
	$(call BOTH,$(call WITH_TORCH,2,python),$(call WITH_TENSORFLOW,$(NEWEST),2,python -m 'tensorflow and not slow'))

# What `test` leaves out of the Python tests: slow ones, other numbers of ranks, libraries of NCCL and NVRTC, which pip fetches,
# and all with the oldest TensorFlow.
test-rest: build/installed $(TENSORFLOWS:%=build/tensorflow-%/installed) clusters trainers jax
	$(call BUILD,build/cmake) gpu_kernels whole_driver_double
	$(call BOTH,$(call ONE_BY_ONE,\
	    $(call WITH_TENSORFLOW,$(NEWEST),0,$(call SIDE_BY_SIDE,2) python -m 'tensorflow and slow'),\
	    $(call WITH_TENSORFLOW,$(NEWEST),2,python -m 'tensorflow and slow'),\
	    $(call WITH_TENSORFLOW,$(NEWEST),1$(comma)3,python -m sizes)),$(call ONE_BY_ONE,\
	    $(call WITH_TORCH,0,$(call SIDE_BY_SIDE,3) multihost python -m slow),\
	    $(call WITH_TORCH,1$(comma)3$(comma)4,python -m 'sizes or torch_sizes')))
	$(if $(OLDEST),$(call BOTH,$(call ONE_BY_ONE,$(call WITH_OLDEST,0,$(call SIDE_BY_SIDE,2)),$(call WITH_TORCH,0,nccl nvrtc)),$(call WITH_OLDEST,2)),\
	  $(call WITH_TORCH,0,nccl nvrtc))

# What schedulers place, each with its own environment. Not Spark beside Ray: workers of Ray may take the port of Spark
# Connect's server. Names and signatures come first: Ray changes the signatures of classes that it has used.
SCHEDULERS := ray spark kubernetes
WITH_SCHEDULER = cd tests && ../build/$(1)/bin/python $(PYTEST) python/test_manifest.py clusters/test_$(1)*.py -k 'clusters or horovod.$(1)'
clusters: build/installed
	$(MAKE) --no-print-directory --jobs 3 $(SCHEDULERS:%=build/%/beside-venv)
	$(call BOTH,$(call WITH_SCHEDULER,kubernetes),$(call WITH_SCHEDULER,ray))
	$(call WITH_SCHEDULER,spark)

trainers: build/trainers/beside-venv build/mpi
	cd tests && ../build/trainers/bin/python $(PYTEST) trainers

jax: build/jax/beside-venv build/mpi
	cd tests && ../build/jax/bin/python $(PYTEST) -n 2 with_jax

comma := ,
WITH_OLDEST = $(call WITH_TENSORFLOW,$(OLDEST),$(1),$(2) python -m 'tensorflow and not newest_tensorflow and not slow')

test-all: test test-rest aarch64 sanitize fuzz

NP ?= 0
pytest: $(if $(filter tensorflow,$(WITH)),build/tensorflow-$(NEWEST)/installed,build/installed)
	$(if $(filter tensorflow,$(WITH)),$(call WITH_TENSORFLOW,$(NEWEST),$(NP),$(or $(FILES),python -m tensorflow)),$(call WITH_TORCH,$(NP),$(FILES)))

unit: packages-tests build/cmake/build.ninja
	@if .ci/packages has GoogleTest; then $(MAKE) --no-print-directory unit-tests; else echo 'missing: GoogleTest (Debian, Ubuntu:' \
	  'apt-get install libgtest-dev): all' $$(grep -rhE '^(TEST|TYPED_TEST)' tests/unit tests/harp | wc -l) 'C++ tests skipped'; fi

# Called with how many parts of a program's tests run side by side, where tests often wait, and the program.
PARTS = seq 0 $$(($(1) - 1)) | xargs -P $(1) -I {} env GTEST_TOTAL_SHARDS=$(1) GTEST_SHARD_INDEX={} $(2) --gtest_brief=1
# With labels (tests/labels.h) they run again with TCP, HARP and a network plugin between the ranks.
NETWORK = LIGHTCC_TEST_RANKS_PER_HOST=$(1) LIGHTCC_TEST_NET=$(2) $(call PARTS,4,build/cmake/unit_tests)
unit-tests: build/cmake/build.ninja
	$(CMAKE) -B build/cmake >/dev/null  # GoogleTest may be newer than the last look for it
	$(call BUILD,build/cmake) unit_tests harp_tests harp_peer harpd harp-bench harp-stat harp-plugtest nccl-net-harp
ifdef FILTER
	build/cmake/unit_tests --gtest_filter='$(FILTER)'
	build/cmake/harp_tests --gtest_filter='$(FILTER)'
else
	$(call PARTS,4,build/cmake/unit_tests)
	$(call PARTS,4,build/cmake/harp_tests)
	$(call NETWORK,2,) --labels=on_hosts
	$(call NETWORK,1,harp) --labels=on_hosts
	$(call NETWORK,1,$(abspath build/cmake/libnet_plugin_double.so)) --labels=on_hosts,-watches_network
endif

harp: build/cmake/build.ninja
	$(call BUILD,build/cmake) harp nccl-net-harp harpd harp-stat harp-bench
	$(if $(PREFIX),$(BIN)/cmake --install build/cmake --strip --component harp --prefix $(PREFIX))

bench: build/installed
	$(BIN)/python bench/smoke.py

TURNS ?= 10
elastic-soak: build/installed
	cd tests && ../$(BIN)/python soak/elastic.py --turns $(TURNS)

# They build in build/gpu, and install nothing. BEFORE: lightcc's library of another build, with whose kernels those of this
# one are compared.
gpu-test:
	$(PYTHON) tests/gpu/run.py
gpu-bench:
	$(PYTHON) bench/gpu.py $(abspath $(BEFORE))
gpu-compression:
	$(PYTHON) bench/gpu_compression.py

lint: build/cmake/build.ninja
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTHON) .ci/layers.py
	$(PYTHON) .ci/pages.py
	$(PYTHON) .ci/vocabulary.py
	$(BIN)/python tools/parity.py --check
	$(BIN)/hadolint Dockerfile
	! LC_ALL=C.UTF-8 grep -rnE '^.{121,}' csrc harp_plugin tests tools --include='*.cc' --include='*.cu' --include='*.h'
	$(call BUILD,build/cmake) knobs
	build/cmake/knobs | diff - docs/knobs.md || { echo 'docs/knobs.md is old: build/cmake/knobs > docs/knobs.md'; false; }

# Needs neither the core nor a framework. --strict: a link or an anchor that leads nowhere fails it.
docs: build/docs-venv/installed
	NO_MKDOCS_2_WARNING=1 build/docs-venv/bin/mkdocs build --quiet --strict
	@echo 'open build/site/index.html'

# The plugin's conformance; with TSan, where threads meet. Leaks are looked for where all engines end: those of versions up
# to 10 live as long as the process. The versions have one engine below them, so what threads do is looked at with one.
PLUGTEST = HARP_IFNAME=lo HARP_CONNECT_TIMEOUT_MS=500 HARP_MAX_RECVS=8 $(1)/harp-plugtest $(1)/libnccl-net-harp.so
# Random networks of HARP's simulator under sanitizers; without, all that the test has.
sanitize: export HARP_SEEDS = 24
# Up to gcc 13, AddressSanitizer takes a dynamic TLS block at certain addresses for one of glibc 2.19 and follows a pointer
# that is not there: about one run in a hundred then ends with "Tracer caught signal 11" although all tests have passed.
sanitize fuzz: export ASAN_OPTIONS = intercept_tls_get_addr=0
# ThreadSanitizer's memory map does not fit every kernel's address randomisation.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)
# A report stands in a file and is printed last, behind what the other parts say.
REPORTED = || { cat build/thread/report.* 2>/dev/null; false; }
sanitize: export TSAN_OPTIONS = log_path=$(abspath build/thread/report)
SANITIZED := unit_tests harp_tests harp-plugtest nccl-net-harp
sanitize-build: build/address/build.ninja build/thread/build.ninja
	$(call BUILD,build/thread) $(SANITIZED)
	$(call BUILD,build/address) all  # with what `make fuzz` needs
sanitize: build/address/build.ninja build/thread/build.ninja
	$(call BUILD,build/address) $(SANITIZED)
	ASAN_OPTIONS=$$ASAN_OPTIONS:detect_leaks=0 $(call PLUGTEST,build/address) version=12
	ASAN_OPTIONS=$$ASAN_OPTIONS:detect_leaks=0 $(call PLUGTEST,build/address) only=properties,sizes,grouped,registration
	$(call PLUGTEST,build/address) version=12 only=outstanding,close-under-way,reload
	$(call PARTS,3,build/address/harp_tests) --labels=-idle
	UBSAN_OPTIONS=print_stacktrace=1 $(call PARTS,3,build/address/unit_tests) --labels=-no_descriptors
	$(call BUILD,build/thread) $(SANITIZED)
	rm -f build/thread/report.*
	$(NO_ASLR) env $(call PLUGTEST,build/thread) version=12 only=registration,deregister-in-use,close-under-way,threads,ring-all-reduce $(REPORTED)
	$(call PARTS,3,$(NO_ASLR) build/thread/harp_tests) --labels=-alone,-idle $(REPORTED)
	$(call PARTS,3,$(NO_ASLR) build/thread/unit_tests) --labels=-alone $(REPORTED)
	LIGHTCC_TEST_RANKS_PER_HOST=1 $(call PARTS,3,$(NO_ASLR) build/thread/unit_tests) --labels=on_hosts $(REPORTED)

# For aarch64 (Graviton, Grace Hopper): the libraries, and on an emulated processor tests in which no thread meets another
# (tests/labels.h): of HARP all, of lightcc arithmetic, messages and decisions. qemu has less address space than arenas
# want, no MADV_REMOVE, and no kernel that answers about neighbours or AF_XDP.
EMULATED = qemu-aarch64-static -L /usr/aarch64-linux-gnu build/aarch64
EMULATED_TESTS = Quantized*:*TopK*:*Reduce*:Types*:Wire*:Message*:Json*:Sha256*:Hmac*:Config*:CudaPack*:CudaScale*:Handshake.*:Plan*:ResponseCache*:Residual*:Embedding*:Cost*:Selector*-*CudaCodecDouble*
aarch64: packages-aarch64
	@if .ci/packages has cross && .ci/packages has qemu; then $(MAKE) --no-print-directory aarch64-tests; \
	  else echo 'missing: a compiler for aarch64 or qemu-user-static: nothing is compiled for it'; fi
aarch64-tests: build/aarch64/build.ninja
	$(call BUILD,build/aarch64) _lightcc _lightcc_tensorflow harp nccl-net-harp unit_tests harp_tests
	$(call PARTS,$(JOBS),$(EMULATED)/unit_tests) --gtest_filter='$(EMULATED_TESTS)'
	$(call PARTS,$(JOBS),$(EMULATED)/harp_tests) --gtest_filter='-Harpd.*:Xdp.*'

fuzz: build/address/build.ninja
	$(call BUILD,build/address) all
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

include .ci/environments.mk
