"""--check-build and --version of lightccrun."""
import importlib.util
import re
from pathlib import Path

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


DRIVER_DOUBLE = str(Path(__file__).parents[2] / "build" / "cmake" / "driver_double")
ABSENT = ", which compiles lightcc's kernels, was not found for a driver of CUDA {}; pip install {} brings it"
ON_GPUS = re.compile(r"\nTensors of GPUs:\n((?:    \[[X ]\] .+\n){3})    They travel (.+)\.\n")


def on_gpus(**environment):
    """Driver, NVRTC, NCCL, and how tensors of GPUs travel, as --check-build says it in this environment."""
    code, out, err = start("--check-build", **environment).finish()
    assert (code, err) == (0, "")
    rows, way = ON_GPUS.search(out).groups()
    return [*(line[4:] for line in rows.splitlines()), way]


def test_check_build_with_drivers(tmp_path):
    """None; one that is too old; one without GPUs. NVRTC is looked for all the same."""
    if importlib.util.find_spec("nvidia"):
        pytest.skip("CUDA's wheels are here, which have NVRTC and NCCL")
    if not Path(DRIVER_DOUBLE, "libcuda.so.1").exists():
        pytest.skip(f"missing: {DRIVER_DOUBLE}/libcuda.so.1; `make unit` builds it")
    (tmp_path / "libcuda.so.1").write_text("")
    driver, nvrtc, nccl, way = on_gpus(LD_LIBRARY_PATH=str(tmp_path))
    assert driver.startswith("[ ] CUDA driver: there is none here (") and "libcuda.so.1: file too short" in driver
    assert nvrtc == "[ ] NVRTC" + ABSENT.format("13.0", "nvidia-cuda-nvrtc")
    assert nccl == "[ ] NCCL was not found" and way == "not at all without a CUDA driver that can be used"
    double = dict(LD_LIBRARY_PATH=DRIVER_DOUBLE, LIGHTCC_TEST_DRIVER_VERSION="11010")
    said = "it is too old: it is of CUDA 11.1, and lightcc needs 11.2, which comes with the drivers from 460 on"
    assert on_gpus(**double)[0] == f"[ ] CUDA driver: {said}"
    driver, nvrtc, _, way = on_gpus(**{**double, "LIGHTCC_TEST_DRIVER_VERSION": "12080"})
    assert driver == "[X] CUDA driver 12.8, GPUs: none"
    assert nvrtc == "[ ] NVRTC" + ABSENT.format("12.8", "nvidia-cuda-nvrtc-cu12")
    assert way == "through the host, since NVRTC cannot be used"


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
