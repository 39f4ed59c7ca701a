"""--harp of lightccrun: NCCL's plugin of each host, and what --check-build says of it."""
import os
import subprocess
import sys

import pytest

from jobs import launch, start
from lightcc.core import nccl_library
from lightcc.launch import nccl_plugin


def test_ranks_get_their_own_hosts_plugin():
    code, out, _ = launch("-np", "2", "--harp", "sh", "-c", "echo $NCCL_NET_PLUGIN $NCCL_NET")
    assert code == 0 and out.count(f"{nccl_plugin.PATH} HARP") == 2, out


def test_other_plugins_are_left_alone():
    assert nccl_plugin.with_path({"NCCL_NET_PLUGIN": "aws-ofi"}) == {"NCCL_NET_PLUGIN": "aws-ofi"}
    assert nccl_plugin.with_path({}) == {}


def test_a_host_without_the_plugin_is_told(monkeypatch):
    monkeypatch.setattr(nccl_plugin, "PATH", "/no/libnccl-net-harp.so")
    with pytest.raises(FileNotFoundError, match="there is no /no/libnccl-net-harp.so; install"):
        nccl_plugin.with_path(dict(nccl_plugin.SETTINGS))
    assert "cannot be loaded" in nccl_plugin.report()[1]


def test_check_build_starts_the_plugin():
    code, out, err = start("--check-build", "--harp", HARP_IFNAME="lo").finish()
    assert (code, err) == (0, "") and "exports versions 12, 11, 10, 9, 8, 7, 6\n" in out and "it starts" in out, out
    code, out, err = start("--check-build", "--harp", HARP_IFNAME="nix0").finish()
    assert code == 1 and "it cannot start" in out and "'nix0'" in err and "HARP_IFNAME" in err, err


def compiled(library, code):
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=code, text=True, check=True)
    return library


@pytest.fixture
def nccl(tmp_path, monkeypatch):
    """A library that says it is NCCL of a version."""
    def of_version(version):
        library = compiled(tmp_path / "libnccl.so.2",
                           f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}")
        monkeypatch.setattr(nccl_library, "path", lambda: str(library))
        return library
    return of_version


def test_a_nccl_that_takes_no_path_gets_a_name_and_the_folder(nccl):
    """Before 2.21 NCCL makes a name of whatever NCCL_NET_PLUGIN is."""
    folder = os.path.dirname(nccl_plugin.PATH)
    nccl(22005)
    assert nccl_plugin.with_path(dict(nccl_plugin.SETTINGS)) == {**nccl_plugin.SETTINGS, "LD_LIBRARY_PATH": folder}
    others = nccl_plugin.with_path({**nccl_plugin.SETTINGS, "LD_LIBRARY_PATH": "/a:/b"})
    assert others == {**nccl_plugin.SETTINGS, "LD_LIBRARY_PATH": f"{folder}:/a:/b"}


def test_later_ones_and_those_that_are_not_found_get_a_path(nccl, monkeypatch):
    with_path = {**nccl_plugin.SETTINGS, "NCCL_NET_PLUGIN": nccl_plugin.PATH}
    nccl(22105)
    assert nccl_plugin.with_path(dict(nccl_plugin.SETTINGS)) == with_path
    for unknown in (None, "/no/libnccl.so.2"):
        monkeypatch.setattr(nccl_library, "path", lambda path=unknown: path)
        assert nccl_plugin.with_path(dict(nccl_plugin.SETTINGS)) == with_path


@pytest.mark.parametrize("version, said", [
    (21406, "NCCL 2.14.6 ({}) is older than 2.15 and loads none of them"),
    (21805, "NCCL 2.18.5 ({}) loads version 6, by its name and LD_LIBRARY_PATH only\n"),
    (21903, "NCCL 2.19.3 ({}) loads version 7, by its name"), (22105, "NCCL 2.21.5 ({}) loads version 8\n"),
    (22501, "NCCL 2.25.1 ({}) loads version 9\n"), (22602, "NCCL 2.26.2 ({}) loads version 10\n"),
    (22907, "NCCL 2.29.7 ({}) loads version 11\n"), (23000, "NCCL 2.30.0 ({}) loads version 12\n")])
def test_check_build_says_what_nccl_loads(nccl, monkeypatch, version, said):
    library = nccl(version)
    monkeypatch.setenv("HARP_IFNAME", "lo")
    text, fault = nccl_plugin.report()
    assert said.format(library) in text and fault == ""


def test_without_nccl_it_says_so(monkeypatch):
    monkeypatch.setattr(nccl_library, "path", lambda: None)
    monkeypatch.setenv("HARP_IFNAME", "lo")
    assert "NCCL is not installed here" in nccl_plugin.report()[0]


# What NCCL 2.27 to 2.29 do with a plugin when their last communicator ends, and at the next one. Prints the name of
# each plugin that was opened; ends with an error if one of that name has other tables than before.
LIVES = """
import _ctypes, ctypes, sys
from lightcc.launch import nccl_plugin

FINALIZE = 20  # its place in the table

def table(library):
    return ctypes.addressof(nccl_plugin._Net.in_dll(library, "ncclNetPlugin_v12"))

def begin(name):
    library, context = ctypes.CDLL(name), ctypes.c_void_p()
    net = nccl_plugin._Net.in_dll(library, "ncclNetPlugin_v12")
    log = nccl_plugin._Logger(lambda *_: None)
    nccl_plugin._loggers.append(log)
    assert net.init(ctypes.byref(context), 1, None, log, None) == 0
    seen.setdefault(net.name.decode(), table(library))
    assert seen[net.name.decode()] == table(library), "other tables than before"
    print(net.name.decode())
    return library

def end(library):
    finalize = ctypes.cast(table(library), ctypes.POINTER(ctypes.c_void_p))[FINALIZE]
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(finalize)(None) == 0
    _ctypes.dlclose(library._handle)

seen = {}
kept = begin("libnccl-net.so") if sys.argv[1] == "other" else None
for name in (nccl_plugin.PATH, *sys.argv[2:]):
    end(begin(name))
if kept:
    end(kept)
for _ in range(2):
    end(begin("libnccl-net.so"))
"""
OTHER = """
static int ok(void) { return 0; }
const void* ncclNetPlugin_v12[22] = { "OTHER", ok, [20] = ok };
"""


@pytest.mark.parametrize("arguments, expected", [
    (["harp"], "HARP HARP HARP"), (["harp", "libnccl-net.so"], "HARP HARP HARP HARP"),
    (["other"], "OTHER HARP HARP HARP"), (["other", "libnccl-net.so"], "OTHER HARP OTHER HARP HARP")],
    ids=["alone", "HARP first", "another first", "another first, and kept"])
def test_the_plugin_is_found_again_by_the_default_name(tmp_path, arguments, expected):
    """After it was closed, also where another plugin has that name; but not while that one is loaded."""
    environment = {**os.environ, "HARP_IFNAME": "lo"}
    if arguments != ["harp"]:
        compiled(tmp_path / "libnccl-net.so", OTHER)
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", LIVES, *arguments], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, expected.split()), done
