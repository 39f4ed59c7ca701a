"""--check-build and --version of lightccrun."""
import re

from jobs import launch, start
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
