"""--check-build and --version of lightccrun."""
import ctypes.util
import re
import subprocess

import pytest

from jobs import launch, start
from lightcc.core import lib, nccl_library
from lightcc.runner import check_build


def test_check_build():
    for flag in ("-cb", "--check-build"):
        code, out, err = launch(flag)
        assert (code, err) == (0, "") and re.match(r"lightcc v\d+\.\d+\.\d+\S*:\n\nAvailable Frameworks:\n", out)
        sections = dict(re.findall(r"\n(Available .+):\n((?:    \[[X ]\] .+\n)+)", out))
        assert list(sections) == ["Available Frameworks", "Available Controllers", "Available Tensor Operations"]
        rows = {title: dict((name, mark == "X") for mark, name in re.findall(r"    \[(.)\] (.+)", text))
                for title, text in sections.items()}
        assert rows["Available Frameworks"]["PyTorch"] and rows["Available Frameworks"]["NumPy"]
        assert [there for name, there in rows["Available Controllers"].items()] == [False, True]  # MPI, Gloo
        operations = rows["Available Tensor Operations"]
        assert [name for name, there in operations.items() if not there] == ["NCCL", "DDL", "CCL", "MPI"]
        assert operations["lightcc shared memory"] and operations["lightcc TCP between hosts"]
        assert "    [X] lightcc HARP between hosts (LIGHTCC_NET=harp; mostly slower than TCP: docs/harp.md)\n" in out


ON_GPUS = re.compile(r"\nTensors of GPUs:\n((?:    \[[X ]\] .+\n){3})    They travel (.+)\.\n")


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="there is a CUDA driver")
def test_check_build_without_a_driver():
    rows, way = ON_GPUS.search(launch("--check-build")[1]).groups()
    driver, _, nccl = rows.splitlines()
    assert driver.startswith("    [ ] CUDA driver: there is none here (libcuda.so.1: cannot open shared object file")
    assert nccl == "    [ ] NCCL was not found" and way == "not at all without a CUDA driver that can be used"


def test_check_build_with_a_driver_that_is_too_old(tmp_path):
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *version) { return *version = 11010, 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code, out, err = start("--check-build", LD_LIBRARY_PATH=str(tmp_path)).finish()
    assert (code, err) == (0, "")
    said = "it is too old: it is of CUDA 11.1, and lightcc needs 11.2, which comes with the drivers from 460 on"
    assert f"    [ ] CUDA driver: {said}\n" in out


@pytest.mark.parametrize("driver, nvrtc, nccl, way", [
    ("+", "+", 22809, "by NCCL, or through the host with LIGHTCC_NCCL=0"),
    ("+", "-", 22809, "through the host, since NVRTC cannot be used"),
    ("+", "+", 21701, "through the host, since NCCL cannot be used"),
    ("+", "+", None, "through the host, since NCCL cannot be used"),
    ("-", "+", 22809, "not at all without a CUDA driver that can be used"),
])
def test_check_build_says_how_tensors_of_gpus_travel(monkeypatch, driver, nvrtc, nccl, way):
    monkeypatch.setattr(lib, "describe", {"gpus": f"{driver}CUDA driver 12.4\n{nvrtc}NVRTC 12.4\n"}.get)
    monkeypatch.setattr(nccl_library, "path", lambda: nccl and "/wheels/libnccl.so.2")
    monkeypatch.setattr(nccl_library, "version", lambda path: nccl)
    rows, said = ON_GPUS.search(check_build.report()[0]).groups()
    marks = [line[5] == "X" for line in rows.splitlines()]
    assert said == way and marks == [driver == "+", nvrtc == "+", nccl == 22809]
    assert nccl != 21701 or "NCCL 2.17.1 (/wheels/libnccl.so.2) is too old: lightcc needs 2.18.0\n" in rows


def test_check_build_answers_as_basics_does(monkeypatch):
    from lightcc.core.basics import HorovodBasics
    monkeypatch.setattr(HorovodBasics, "nccl_built", lambda self: 22703)
    text, fault = check_build.report()
    assert "    [X] NCCL\n    [ ] DDL\n" in text and fault == ""


def test_a_framework_needs_a_package_of_ours_too(monkeypatch):
    found = {"lightcc.torch": object(), "torch": None, "tensorflow": object(), "lightcc.numpy": object(),
             "numpy": object()}
    monkeypatch.setattr(check_build.importlib.util, "find_spec", found.get)
    assert "    [ ] TensorFlow\n    [ ] PyTorch\n    [ ] MXNet\n    [X] NumPy\n" in check_build.report()[0]


def test_check_build_without_the_library():
    code, out, err = start("--check-build", LIGHTCC_LIBRARY="/no/library.so").finish()
    assert code == 1 and "[X]" not in out and "[ ] lightcc shared memory" in out
    assert re.match(r"lightccrun: lightcc's library could not be loaded: /no/library.so: ", err)


def test_version():
    from lightcc import __version__
    assert launch("-v") == launch("--version") == (0, f"{__version__}\n", "")
