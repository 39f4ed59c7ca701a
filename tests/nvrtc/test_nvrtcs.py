"""NVRTCs of three versions of CUDA compile lightcc's kernels, without a GPU. Their wheels come from PyPI into
build/nvrtc and stay."""
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP_S, COMPILE_S = 900, 300
WHEELS = {  # the version of PTX, the GPUs that it is asked for, and those for which it has code
    "nvidia-cuda-nvrtc-cu11==11.8.89": ("7.8", (70, 75, 80, 90, 100), {70, 75, 80, 90}),
    "nvidia-cuda-nvrtc-cu12==12.4.127": ("8.4", (70, 75, 80, 90, 100), {70, 75, 80, 90}),
    "nvidia-cuda-nvrtc==13.0.88": ("9.0", (75, 80, 90, 100), {75, 80, 90, 100}),
}
SCALE = {f"lightcc_scale_{dtype}" for dtype in range(11)}
COPY = {"lightcc_copy_few", "lightcc_copy_many"}
LINE = re.compile(r"(device/cuda/\w+\.cu) (sm|compute)_(\d+): (machine code|PTX), \d+ bytes, PTX ([\d.]+),(.*)")


def library_of(wheel):
    """Its libnvrtc. Skips the test where the wheel cannot be had."""
    folder = ROOT / "build" / "nvrtc" / wheel.replace("==", "-")

    def find():
        return [path for path in folder.glob("nvidia/*/lib/libnvrtc.so.*") if ".alt." not in path.name]

    if not find():
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                 "--no-compile", "--only-binary", ":all:", "--target", str(folder), wheel],
                capture_output=True, text=True, timeout=PIP_S, check=False)
            why = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"pip was not done after {PIP_S} s"
        if why or not find():
            pytest.skip(f"missing: {wheel} ({(why or 'it has no library').splitlines()[-1]})")
    return find()[0]


def compiled(library, *architectures):
    return subprocess.run([ROOT / "build" / "cmake" / "gpu_kernels", library, *map(str, architectures)], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMPILE_S, check=False)


@pytest.mark.parametrize("wheel", WHEELS)
def test_it_compiles_the_kernels(wheel):
    """What it does not know, it compiles to PTX of the newest GPU that it knows. PTX is never newer than its CUDA."""
    ptx_version, asked, known = WHEELS[wheel]
    done = compiled(library_of(wheel), *asked)
    assert done.returncode == 0, done.stdout
    assert re.match(r"NVRTC [\d.]+\n", done.stdout), done.stdout
    lines = LINE.findall(done.stdout)
    names = {}
    for program, kind, architecture, form, ptx, kernels in lines:
        names.setdefault((kind, int(architecture), form), []).extend(kernels.split())
        assert ptx == ptx_version, (program, ptx)
    expected = SCALE | (COPY if ptx_version >= "8.1" else COPY - {"lightcc_copy_many"})
    assert all(len(each) == len(set(each)) and set(each) == expected for each in names.values()), names
    in_code = {architecture for kind, architecture, form in names if (kind, form) == ("sm", "machine code")}
    as_ptx = {architecture for kind, architecture, form in names if (kind, form) == ("compute", "PTX")}
    assert in_code == known and len(in_code) + len(as_ptx) == len(names)
    assert as_ptx == ({max(known)} if set(asked) - known else set())


def test_a_gpu_that_is_too_old_is_named():
    """CUDA 13 has no code for sm_70 any more."""
    library = library_of("nvidia-cuda-nvrtc==13.0.88")
    done = compiled(library, 70)
    assert done.returncode == 1
    said = r"NVRTC 13\.0\nNVRTC 13\.0 \(.*\) does not know GPUs as old as sm_70\n"
    assert re.fullmatch(said, done.stdout), done.stdout
