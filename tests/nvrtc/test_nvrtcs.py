"""NVRTCs of three versions of CUDA compile lightcc's kernels, without a GPU. Their wheels come from PyPI into
build/nvrtc and stay."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wheels import library_of

ROOT = Path(__file__).resolve().parents[2]
DRIVER_DOUBLE = ROOT / "build" / "cmake" / "driver_double"
COMPILE_S = 300
WHEELS = {  # the version of PTX, the GPUs that it is asked for, and those for which it has code
    "nvidia-cuda-nvrtc-cu11==11.8.89": ("7.8", (60, 70, 75, 80, 90, 100), {60, 70, 75, 80, 90}),
    "nvidia-cuda-nvrtc-cu12==12.4.127": ("8.4", (60, 70, 75, 80, 90, 100), {60, 70, 75, 80, 90}),
    "nvidia-cuda-nvrtc==13.0.88": ("9.0", (75, 80, 90, 100), {75, 80, 90, 100}),
}
SCALE = {f"lightcc_scale_{dtype}" for dtype in range(13)}
COPY = {"lightcc_copy_few", "lightcc_copy_many"}
CODECS = {f"lightcc_{name}" for name in
          re.findall(r"  X\((\w+), ", (ROOT / "csrc" / "device" / "cuda" / "codec_steps.h").read_text())}
LINE = re.compile(r"(device/cuda/\w+\.cu) (sm|compute)_(\d+): (machine code|PTX), \d+ bytes, PTX ([\d.]+),(.*)")


def nvrtc_of(wheel):
    return library_of(wheel, "nvrtc", "nvidia/*/lib/libnvrtc.so.*")


def compiled(library, *architectures):
    return subprocess.run([ROOT / "build" / "cmake" / "gpu_kernels", library, *map(str, architectures)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMPILE_S, check=False)


@pytest.mark.parametrize("wheel", WHEELS)
def test_it_compiles_the_kernels(wheel):
    """What it does not know, it compiles to PTX of the newest GPU that it knows. PTX is never newer than its CUDA."""
    ptx_version, asked, known = WHEELS[wheel]
    done = compiled(nvrtc_of(wheel), *asked)
    assert done.returncode == 0, done.stdout
    assert re.match(r"NVRTC [\d.]+\n", done.stdout), done.stdout
    lines = LINE.findall(done.stdout)
    names = {}
    for program, kind, architecture, form, ptx, kernels in lines:
        names.setdefault((kind, int(architecture), form), []).extend(kernels.split())
        assert ptx == ptx_version, (program, ptx)
    for (_, architecture, _), each in names.items():
        has_long_arguments = ptx_version >= "8.1" and architecture >= 70
        assert sorted(each) == sorted(SCALE | CODECS | (COPY if has_long_arguments else {"lightcc_copy_few"})), names
    in_code = {architecture for kind, architecture, form in names if (kind, form) == ("sm", "machine code")}
    as_ptx = {architecture for kind, architecture, form in names if (kind, form) == ("compute", "PTX")}
    assert in_code == known and len(in_code) + len(as_ptx) == len(names)
    assert as_ptx == ({max(known)} if set(asked) - known else set())


def test_a_gpu_that_is_too_old_is_named():
    """CUDA 13 has no code for sm_70 any more."""
    library = nvrtc_of("nvidia-cuda-nvrtc==13.0.88")
    done = compiled(library, 70)
    assert done.returncode == 1
    said = r"NVRTC 13\.0\nNVRTC 13\.0 \(.*\) does not know GPUs as old as sm_70\n"
    assert re.fullmatch(said, done.stdout), done.stdout


@pytest.fixture
def folder(tmp_path):
    """A copy of lightcc's library, beside which wheels can be put."""
    from lightcc.core import lib
    (tmp_path / "lightcc").mkdir()
    shutil.copy(lib._PATH, tmp_path / "lightcc")
    return tmp_path


def chosen(folder, driver, preload=(), path=(), gpu=None):
    """The NVRTC that lightcc's library in the folder finds for a driver of this version, and for this GPU."""
    environment = {**os.environ, "LIGHTCC_TEST_DRIVER_VERSION": str(driver), "LD_PRELOAD": ":".join(map(str, preload)),
                   "LD_LIBRARY_PATH": ":".join(map(str, [DRIVER_DOUBLE, *path])),
                   "LIGHTCC_LIBRARY": str(folder / "lightcc" / "_lightcc.so"),
                   **({} if gpu is None else {"LIGHTCC_TEST_GPU": str(gpu)})}
    done = subprocess.run([sys.executable, "-m", "lightcc.runner", "--check-build"], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMPILE_S, check=False)
    found = re.search(r"    \[.\] NVRTC,? (.*)\n", done.stdout)
    assert done.returncode == 0 and found, done.stdout
    return found[1]


def test_the_one_that_fits_the_driver_is_found(folder):
    """By name: the newest that is not of a later major version."""
    libraries = {wheel.rpartition("==")[2]: nvrtc_of(wheel) for wheel in WHEELS}
    path = [library.parent for library in libraries.values()]
    for driver, library in ((13020, "13.0.88"), (12020, "12.4.127"), (11020, "11.8.89")):
        assert chosen(folder, driver, path=path) == f"{library.rpartition('.')[0]} ({libraries[library]})"
    said = chosen(folder, 11020, path=path[1:])
    assert said.endswith("was not found for a driver of CUDA 11.2; pip install nvidia-cuda-nvrtc-cu11 brings it"), said


def test_one_that_knows_the_gpu_is_found(folder):
    """CUDA 13's knows no sm_70; CUDA 12's does, and is taken although it is older."""
    _, of_12, of_13 = map(nvrtc_of, WHEELS)
    path = [of_13.parent, of_12.parent]
    assert chosen(folder, 13000, path=path, gpu=75) == f"13.0 ({of_13})"
    assert chosen(folder, 13000, path=path, gpu=70) == f"12.4 ({of_12})"
    said = chosen(folder, 13000, path=[of_13.parent], gpu=70)
    assert said == f"13.0 ({of_13}) does not know GPUs as old as sm_70"


def test_the_frameworks_own_is_preferred(folder):
    """What is loaded goes before what lies in wheels or beside the CUDA runtime, and that before what has the name."""
    of_11, of_12, of_13 = map(nvrtc_of, WHEELS)
    assert chosen(folder, 13000, path=[of_13.parent]) == f"13.0 ({of_13})"
    (folder / "nvidia").mkdir()
    (folder / "nvidia" / "cuda_nvrtc").symlink_to(of_12.parents[1])
    in_wheel = folder / "lightcc" / ".." / "nvidia" / "cuda_nvrtc" / "lib" / of_12.name
    assert chosen(folder, 13000, path=[of_13.parent]) == f"12.4 ({in_wheel})"
    assert chosen(folder, 13000, preload=[of_11], path=[of_13.parent]) == f"11.8 ({of_11})"
    (folder / "nvidia" / "cuda_nvrtc").unlink()
    conda = folder / "conda"
    conda.mkdir()
    (conda / "libnvrtc.so.12").symlink_to(of_12)
    runtime = conda / "libcudart.so.12"
    shutil.copy(DRIVER_DOUBLE / "libcuda.so.1", runtime)  # any library will do
    assert chosen(folder, 13000, preload=[runtime], path=[of_13.parent]) == f"12.4 ({conda / 'libnvrtc.so.12'})"
