"""Libraries of NCCL that load HARP's plugin without a GPU: they open it, choose a version of its interface, start it
and ask for its devices, for one communicator after the other. Their wheels come from PyPI into build/nccl and stay."""
import os
import subprocess
import sys

import pytest

from lightcc.launch import nccl_plugin
from wheels import library_of

LOAD_S, LIVES = 120, 3
WHEELS = {"nvidia-nccl-cu11==2.18.3": 6, "nvidia-nccl-cu12==2.19.3": 7, "nvidia-nccl-cu11==2.21.5": 8,
          "nvidia-nccl-cu12==2.25.1": 9, "nvidia-nccl-cu12==2.28.9": 11}  # and the version of the interface
# Up to 2.21 ncclGetUniqueId loads the plugin; later ones do it when a communicator is made, which needs a GPU. Its
# first steps do not; they are functions that are not exported: ncclNetPluginLoad, and ncclNetInit, which starts the
# plugin. They read settings of the communicator (zeros are none) and write there what they have chosen.
# ncclNetFinalize or ncclNetPluginUnload close the plugin with the only communicator.
PROGRAM = """
import ctypes, subprocess, sys

def symbols(*flags):
    lines = subprocess.check_output(["nm", *flags, sys.argv[1]], text=True).splitlines()
    return {name: int(address, 16) for address, _, name in (line.split() for line in lines if line[0] != " ")}

nccl = ctypes.CDLL(sys.argv[1])
assert nccl.ncclGetUniqueId(ctypes.create_string_buffer(128)) == 0
start = ctypes.cast(nccl.ncclGetUniqueId, ctypes.c_void_p).value - symbols("-D")["ncclGetUniqueId"]
own = symbols()
for life in range(int(sys.argv[2])):
    communicator = ctypes.create_string_buffer(64 << 20)
    for name in ("_Z17ncclNetPluginLoadP8ncclComm", "_Z11ncclNetInitP8ncclComm", "_Z15ncclNetFinalizeP8ncclComm",
                 "_Z19ncclNetPluginUnloadP8ncclComm"):
        if name in own:
            function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(start + own[name])
            print(name, "returned", function(ctypes.addressof(communicator)), flush=True)
"""


@pytest.mark.parametrize("wheel", WHEELS)
def test_nccl_loads_the_plugin(wheel, monkeypatch):
    """As --harp sets the environment for it, and again after it has unloaded the plugin."""
    library = library_of(wheel, "nccl", "nvidia/nccl/lib/libnccl.so.2")
    monkeypatch.setenv("LIGHTCC_NCCL_LIBRARY", str(library))
    environment = nccl_plugin.with_path({**os.environ, **nccl_plugin.SETTINGS, "NCCL_DEBUG": "INFO",
                                         "NCCL_SOCKET_IFNAME": "lo"})
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(library), str(LIVES)], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LOAD_S, check=False)
    version, said = WHEELS[wheel], done.stdout
    returned = [line.rsplit(" ", 1) for line in said.splitlines() if " returned " in line]
    assert done.returncode == 0 and len(returned) >= LIVES and {code for _, code in returned} == {"0"}, said
    assert not any(fault in said for fault in ("find ncclNetPlugin", "NET/Socket", "NCCL WARN")), said
    unloaded = any("Finalize" in name or "Unload" in name for name, _ in returned)  # and the plugin started anew
    assert said.count("NET/HARP : device lo 127.0.0.1") >= (LIVES if version >= 11 else 1), said
    if version >= 9:  # earlier ones name only what they do not find
        assert said.count(f"Loaded net plugin HARP (v{version})") == (LIVES if unloaded else 1), said
    text, _ = nccl_plugin.report()
    assert f"loads version {version}" in text, text
