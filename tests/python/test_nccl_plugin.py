"""--harp of lightccrun: NCCL's plugin of each host, and what --check-build says of it."""
import subprocess

import pytest

from jobs import launch, start
from lightcc.common import nccl_library
from lightcc.runner import nccl_plugin


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
    assert (code, err) == (0, "") and "exports versions 12, 11, 10" in out and "it starts" in out, out
    code, out, err = start("--check-build", "--harp", HARP_IFNAME="nix0").finish()
    assert code == 1 and "it cannot start" in out and "'nix0'" in err and "HARP_IFNAME" in err, err


@pytest.mark.parametrize("version, said", [
    (21805, "NCCL 2.18.5 ({}) is older than 2.26 and loads none of them"), (22602, "NCCL 2.26.2 ({}) loads version 10"),
    (22907, "NCCL 2.29.7 ({}) loads version 11"), (23000, "NCCL 2.30.0 ({}) loads version 12")])
def test_check_build_says_what_nccl_loads(tmp_path, monkeypatch, version, said):
    nccl = tmp_path / "libnccl.so.2"
    code = f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", nccl, "-x", "c", "-"], input=code, text=True, check=True)
    monkeypatch.setattr(nccl_library, "path", lambda: str(nccl))
    monkeypatch.setenv("HARP_IFNAME", "lo")
    text, fault = nccl_plugin.report()
    assert said.format(nccl) in text and fault == ""


def test_without_nccl_it_says_so(monkeypatch):
    monkeypatch.setattr(nccl_library, "path", lambda: None)
    monkeypatch.setenv("HARP_IFNAME", "lo")
    assert "NCCL is not installed here" in nccl_plugin.report()[0]
