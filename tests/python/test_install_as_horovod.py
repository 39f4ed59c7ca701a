"""python -m lightcc.as_horovod --install: what it puts into an environment, what that does, and who takes it away."""
import base64
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import lightcc
from lightcc.as_horovod import HOROVOD_VERSION, INFO
from lightcc.install_as_horovod import SHEBANG_LENGTH

PACKAGE = Path(lightcc.__file__).resolve().parent
PTH = "lightcc_as_horovod.pth"
DEADLINE_S = 120  # pip imports much


class Environment:
    """A virtual environment with this lightcc in it, and after its own packages those that the tests have."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        self.site = Path(sysconfig.get_path("platlib", "venv" if sys.version_info >= (3, 11) else "posix_prefix",
                                            vars={"base": str(folder), "platbase": str(folder)}))
        self.python = self.bin / "python"
        self.add_lightcc(self.site)
        (self.site / "zz_outer.pth").write_text(str(PACKAGE.parent) + "\n")  # pip, numpy, torch; lightcc is ours

    @staticmethod
    def add_lightcc(site):
        site.mkdir(parents=True, exist_ok=True)
        (site / "lightcc").symlink_to(PACKAGE)
        for info in PACKAGE.parent.glob("lightcc-*.dist-info"):
            (site / info.name).symlink_to(info)

    def run(self, *command, **variables):
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"),
               "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(list(map(str, command)), env=env, text=True, capture_output=True, timeout=DEADLINE_S,
                              cwd="/")

    def install(self, *words, **variables):
        return self.run(self.python, "-m", "lightcc.as_horovod", *(words or ["--install"]), **variables)

    def files(self):
        return sorted(str(path.relative_to(self.site.parents[2])) for folder in (self.site, self.bin)
                      for path in folder.rglob("*") if not path.is_symlink() and "__pycache__" not in str(path)
                      and not path.is_dir())


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment")


def good(done):
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


VERSIONS = """
import importlib.metadata as metadata
print(metadata.version("horovod"), [found.metadata["Name"] for found in metadata.distributions()].count("horovod"))
import horovod.common.exceptions
print(horovod.__version__, horovod.common.exceptions.__name__)
"""


def test_what_is_installed_and_who_takes_it_away(environment):
    before = environment.files()
    said = good(environment.install())
    assert "`import horovod` is lightcc" in said and str(environment.site / INFO) in said
    installed = environment.files()
    new = sorted(set(installed) - set(before))
    site = os.path.relpath(environment.site, environment.site.parents[2])
    names = ["INSTALLER", "METADATA", "RECORD", "REQUESTED", "WHEEL", "entry_points.txt", "top_level.txt"]
    assert new == sorted(["bin/horovodrun", f"{site}/{PTH}", *(f"{site}/{INFO}/{name}" for name in names)])

    # RECORD says so too, with hashes.
    found = good(environment.run(environment.python, "-c", """
import importlib.metadata as metadata
for file in metadata.files("horovod"):
    print(file, file.hash.value if file.hash else "-", file.size if file.size is not None else "-")"""))
    lines = [line.split() for line in found.splitlines()]
    assert sorted(os.path.relpath((environment.site / line[0]).resolve(), environment.site.parents[2].resolve())
                  for line in lines) == new
    for name, digest, size in lines:
        data = (environment.site / name).read_bytes()
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert (digest, size) == (("-", "-") if name.endswith("RECORD") else (expected, str(len(data))))

    # Again: nothing else. Then a Python whose PYTHONPATH is its own, and the command.
    assert "as it was before" in good(environment.install()) and environment.files() == installed
    expected = f"{HOROVOD_VERSION} 1\n{HOROVOD_VERSION} lightcc.common.exceptions\n"
    assert good(environment.run(environment.python, "-c", VERSIONS, PYTHONPATH="/nowhere")) == expected
    assert good(environment.run("horovodrun", "--version")) == f"{HOROVOD_VERSION}\n"
    child = f"import os, subprocess; subprocess.run(['python', '-c', {VERSIONS!r}], check=True, " \
            "env={**os.environ, 'PYTHONPATH': '/nowhere'})"
    ranks = good(environment.run("horovodrun", "-np", 2, "python", "-c", child))
    assert sorted(ranks.splitlines()) == sorted(f"[{rank}]<stdout>:{line}" for rank in range(2)
                                                for line in expected.splitlines())
    assert environment.run("horovodrun", "-np", 1, "python", "-c", "raise SystemExit(3)").returncode == 3

    # pip knows it, and takes all of it away.
    pip = [environment.python, "-m", "pip", "--disable-pip-version-check"]
    shown = environment.run(*pip, "show", "-f", "horovod").stdout
    assert f"Version: {HOROVOD_VERSION}" in shown and "Requires: lightcc" in shown and "bin/horovodrun" in shown
    removed = environment.run(*pip, "uninstall", "-y", "horovod")
    assert f"Successfully uninstalled horovod-{HOROVOD_VERSION}" in removed.stdout, removed.stderr
    assert environment.files() == before and not (environment.site / INFO).exists()

    # So does --uninstall; and then there is nothing to undo.
    good(environment.install())
    assert "does not stand in for Horovod any more" in good(environment.install("--uninstall"))
    assert environment.files() == before and not (environment.site / INFO).exists()
    assert "nothing to undo" in good(environment.install("--uninstall"))
    done = environment.run(environment.python, "-c", "import horovod")
    assert done.returncode == 1 and "No module named 'horovod'" in done.stderr


def test_requirements_of_other_packages_are_met(environment):
    """As pkg_resources sees them, where setuptools still has it, and packaging."""
    good(environment.install())
    assert good(environment.run(environment.python, "-W", "ignore", "-c", """
import importlib.metadata as metadata
from packaging.requirements import Requirement
wanted = Requirement("horovod[pytorch]>=0.21")
found = metadata.distribution("horovod")
assert wanted.specifier.contains(found.version) and "pytorch" in found.metadata.get_all("Provides-Extra")
assert found.requires == ["lightcc"]
try:
    import pkg_resources
except ModuleNotFoundError:
    print("horovod")
else:
    print(pkg_resources.require("horovod>=0.21")[0].project_name)
""")) == "horovod\n"


def test_without_lightcc_nothing_is_said(environment):
    good(environment.install())
    (environment.site / "lightcc").unlink()
    (environment.site / "zz_outer.pth").unlink()
    assert good(environment.run(environment.python, "-c", "print('started')")) == "started\n"
    (environment.site / "lightcc").mkdir()  # what pip leaves of a package in which there are other files
    assert good(environment.run(environment.python, "-c", "print('started')")) == "started\n"


@pytest.mark.parametrize("what", ["package", "metadata", "command"])
def test_a_real_horovod_is_left_alone(environment, what):
    if what == "package":
        (environment.site / "horovod").mkdir()
        (environment.site / "horovod" / "__init__.py").write_text("")
    elif what == "metadata":
        (environment.site / INFO).mkdir()
        (environment.site / INFO / "METADATA").write_text(f"Name: horovod\nVersion: {HOROVOD_VERSION}\n")
        (environment.site / INFO / "INSTALLER").write_text("pip\n")
    else:
        (environment.bin / "horovodrun").write_text("#!/bin/sh\n")
    before = environment.files()
    done = environment.install()
    assert done.returncode == 1 and done.stdout == "" and "lightcc --install: nothing was changed: " in done.stderr
    assert {"package": "there is a package horovod in", "metadata": f"horovod {HOROVOD_VERSION} is installed in",
            "command": "there is another"}[what] in done.stderr and "lightccrun --as-horovod" in done.stderr
    if what == "metadata":
        done = environment.install("--uninstall")
        assert done.returncode == 1 and "is not lightcc's" in done.stderr
    assert environment.files() == before


def test_for_one_user(tmp_path):
    """Where lightcc is in the user's site-packages, everything goes there."""
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    base = tmp_path / "base"
    site = Path(sysconfig.get_path("purelib", "posix_user", vars={"userbase": str(base)}))
    Environment.add_lightcc(site)

    def run(*words):
        return subprocess.run([python, *words], env={"PYTHONUSERBASE": str(base)}, text=True, capture_output=True,
                              timeout=DEADLINE_S, cwd="/")
    said = good(run("-m", "lightcc.as_horovod", "--install"))
    assert f"Note: {base / 'bin'} is not in PATH" in said
    assert (site / PTH).exists() and (site / INFO / "RECORD").exists()
    assert os.access(base / "bin" / "horovodrun", os.X_OK)
    assert good(run("-c", "import importlib.metadata as m; print(m.version('horovod'))")) == f"{HOROVOD_VERSION}\n"
    good(run("-m", "lightcc.as_horovod", "--uninstall"))
    assert sorted(path.name for path in site.iterdir() if path.name != "lightcc") == \
        sorted(path.name for path in PACKAGE.parent.glob("lightcc-*.dist-info"))
    assert list((base / "bin").iterdir()) == []


def test_another_version_for_packages_that_require_it(environment):
    """lightning-horovod requires horovod<=0.27.0. One version follows the other."""
    before = environment.files()
    for words, version in ((["--install"], HOROVOD_VERSION), (["--install", "--version", "0.27.0"], "0.27.0"),
                           (["--install", "--version=0.26.1"], "0.26.1"), (["--install"], HOROVOD_VERSION),
                           (["--install", "--version", "0.27.0"], "0.27.0")):
        said = good(environment.install(*words))
        info = environment.site / f"horovod-{version}.dist-info"
        assert str(info) in said and [*environment.site.glob("horovod-*")] == [info]
        expected = f"{version} 1\n{version} lightcc.common.exceptions\n"
        assert good(environment.run(environment.python, "-c", VERSIONS)) == expected
        assert good(environment.run("horovodrun", "--version")) == f"{version}\n"
    assert "as it was before" in good(environment.install("--install", "--version", "0.27.0"))
    files = environment.files()
    for wrong in ("0.29.0", "0.27.1", "0.27", "1.0.0", "0.027.0", "0.-1.0", "", "latest", "0.28.1.post1", "x" * 1000):
        done = environment.install("--install", "--version", wrong)
        assert done.returncode == 1 and "nothing was changed: Horovod never had a version " in done.stderr, done
        assert "such as 0.27.0" in done.stderr and len(done.stderr) < 400
    assert "say which" in environment.install("--install", "--version").stderr
    assert "--uninstall takes nothing after it" in environment.install("--uninstall", "--version", "0.27.0").stderr
    assert environment.files() == files
    assert "horovod-0.27.0.dist-info" in good(environment.install("--uninstall"))
    assert environment.files() == before and not [*environment.site.glob("horovod-*")]


def test_where_it_cannot_be(environment, tmp_path):
    """A lightcc that is not installed; wrong words."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "lightcc").symlink_to(PACKAGE)
    (environment.site / "lightcc").unlink()
    (environment.site / "zz_outer.pth").unlink()
    for info in environment.site.glob("lightcc-*.dist-info"):
        info.unlink()
    done = environment.install(PYTHONPATH=str(tmp_path / "checkout"))
    assert done.returncode == 1 and "Install lightcc with pip first" in done.stderr
    done = environment.run(environment.python, "-m", "lightcc.as_horovod", "--install", "now",
                           PYTHONPATH=str(tmp_path / "checkout"))
    assert done.returncode == 1 and "--install takes --version and a version after it, not 'now'" in done.stderr


def test_a_command_in_a_folder_with_a_long_name(tmp_path):
    """Of which a first line would be cut off."""
    folder = tmp_path / ("long name " * 8) / ("x" * SHEBANG_LENGTH)
    folder.mkdir(parents=True)
    environment = Environment(folder)
    good(environment.install())
    assert good(environment.run(environment.bin / "horovodrun", "-v")) == f"{HOROVOD_VERSION}\n"
