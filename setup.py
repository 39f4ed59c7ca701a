"""Builds the libraries in lightcc and the programs of HARP with CMake, and one wheel for every Python: py3-none-*."""
import importlib
import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from distutils.command.build_scripts import build_scripts  # isort: skip  (which setuptools brings: after it)

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "cmake"  # kept, so that a second install compiles only what changed


def program(name, folder):
    """That of the wheel, or without the wheel the system's, as in conda, whose packages of this name are no modules."""
    try:
        return Path(getattr(importlib.import_module(name), folder), name)
    except ImportError:
        return Path(shutil.which(name) or name)


RUN = program("cmake", "CMAKE_BIN_DIR")


class BuildWithCore(build_py):
    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that were removed since the last build
        super().run()
        package = ROOT / "lightcc" if self.editable_mode else Path(self.build_lib, "lightcc").resolve()
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        make = program("ninja", "BIN_DIR")
        subprocess.check_call([RUN, "-S", ROOT, "-B", BUILD, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={make}"])
        subprocess.check_call([RUN, "--build", BUILD, "--target", "lightcc_libraries", "--parallel", jobs])
        subprocess.check_call([RUN, "--install", BUILD, "--strip", "--prefix", package])


class ProgramsOfHarp(build_scripts):
    """Commands that are no scripts: pip puts them beside python as they are, so nothing of Python starts with them."""

    def run(self):
        made = Path(self.get_finalized_command("build").build_temp).resolve() / "harp"
        subprocess.check_call([RUN, "--install", BUILD, "--strip", "--component", "harp", "--prefix", made])
        self.mkpath(self.build_dir)
        for name in self.scripts:
            shutil.copy2(made / "bin" / name, self.build_dir)

    def get_source_files(self):
        return []


class WheelForAnyPython(bdist_wheel):
    """The library is opened with ctypes and knows nothing of Python's ABI, so the tag names the platform only."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    def has_ext_modules(self):  # the package goes where platform-dependent ones go
        return True


setup(distclass=WithLibrary, scripts=["harpd", "harp-stat", "harp-bench"],
      cmdclass={"build_py": BuildWithCore, "build_scripts": ProgramsOfHarp, "bdist_wheel": WheelForAnyPython})
