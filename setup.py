"""Builds the libraries in lightcc with CMake, and one wheel for every Python: py3-none-<platform>."""
import os
import shutil
import subprocess
from pathlib import Path

import cmake
import ninja
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "cmake"  # kept, so that a second install compiles only what changed


class BuildWithCore(build_py):
    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that were removed since the last build
        super().run()
        package = ROOT / "lightcc" if self.editable_mode else Path(self.build_lib, "lightcc").resolve()
        run = Path(cmake.CMAKE_BIN_DIR, "cmake")
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        make = Path(ninja.BIN_DIR, "ninja")
        chosen = [f"-DCMAKE_MAKE_PROGRAM={make}", f"-DLIGHTCC_CUDA={os.environ.get('LIGHTCC_CUDA', '1')}",
                  f"-DLIGHTCC_CUDA_ARCHITECTURES={os.environ.get('LIGHTCC_CUDA_ARCHITECTURES', '')}"]
        subprocess.check_call([run, "-S", ROOT, "-B", BUILD, "-G", "Ninja", *chosen])
        subprocess.check_call([run, "--build", BUILD, "--target", "lightcc_libraries", "--parallel", jobs])
        subprocess.check_call([run, "--install", BUILD, "--strip", "--prefix", package])


class WheelForAnyPython(bdist_wheel):
    """The library is opened with ctypes and knows nothing of Python's ABI, so the tag names the platform only."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self):  # the package goes where platform-dependent ones go
        return True


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithCore, "bdist_wheel": WheelForAnyPython})
