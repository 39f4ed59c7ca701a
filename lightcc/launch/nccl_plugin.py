"""HARP, NCCL's network plugin: where it lies on this host, and what --harp --check-build says of it (docs/nccl.md)."""

import ctypes
import os
from typing import Any, Optional

from lightcc.core import nccl_library

PATH = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "libnccl-net-harp.so")
SETTINGS = {"NCCL_NET_PLUGIN": "harp", "NCCL_NET": "HARP"}  # of --harp; each host's starter puts its own path in
VERSIONS = {12: 23000, 11: 22800, 10: 22600, 9: 22400, 8: 22000, 7: 21900, 6: 21500}  # of the plugin's interface, and
# the first NCCL that loads it
TAKES_PATHS = 22100  # the first NCCL whose NCCL_NET_PLUGIN may be a path
_Logger = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p,
                           ctypes.c_char_p)  # all lines of the plugin have one argument
_WARN = 2
_loggers: list[Any] = []


class _Net(ctypes.Structure):
    """The beginning of versions 11 and 12, as far as it is needed here."""

    _fields_ = [("name", ctypes.c_char_p),
                ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint64,
                                          ctypes.c_void_p, _Logger, ctypes.c_void_p))]


def report() -> tuple[str, str]:
    """The text, and why the plugin cannot be used ("" if it can). Starts it once, as NCCL would."""
    try:
        plugin = ctypes.CDLL(PATH)
    except OSError as error:
        return "", f"HARP's plugin cannot be loaded: {error}"
    exported = [version for version in VERSIONS if hasattr(plugin, f"ncclNetPlugin_v{version}")]
    lines = [f"{PATH} exports versions {', '.join(map(str, exported))}", _what_nccl_loads(exported)]
    fault = _start(plugin)
    lines.append("it cannot start" if fault else "it starts")
    return "\nHARP, NCCL's network plugin:\n" + "".join(f"    {line}\n" for line in lines), fault


def with_path(environment: dict[str, str]) -> dict[str, str]:
    """NCCL_NET_PLUGIN=harp means this host's own: the dynamic loader would not look in this package. So a path is put
    there; or for a NCCL that takes a name only, the package into LD_LIBRARY_PATH. Raises FileNotFoundError if there is
    no plugin."""
    if environment.get("NCCL_NET_PLUGIN") != SETTINGS["NCCL_NET_PLUGIN"]:
        return environment
    if not os.path.exists(PATH):
        raise FileNotFoundError(f"NCCL_NET_PLUGIN=harp: there is no {PATH}; install lightcc's wheel on this host")
    if _nccl_takes_paths():
        return {**environment, "NCCL_NET_PLUGIN": PATH}
    folders = [os.path.dirname(PATH), *filter(None, [environment.get("LD_LIBRARY_PATH")])]
    return {**environment, "LD_LIBRARY_PATH": ":".join(folders)}


def _nccl_takes_paths() -> bool:
    """True where it is not known which NCCL there is, as of those in use most do."""
    nccl = nccl_library.path()
    try:
        return nccl is None or nccl_library.version(nccl) >= TAKES_PATHS
    except OSError:
        return True


def _what_nccl_loads(exported: list[int]) -> str:
    nccl = nccl_library.path()
    if nccl is None:
        return "NCCL is not installed here"
    try:
        code = nccl_library.version(nccl)
    except OSError as error:
        return f"NCCL cannot be loaded: {error}"
    name = f"NCCL {code // 10000}.{code // 100 % 100}.{code % 100} ({nccl})"
    version = next((version for version in exported if code >= VERSIONS[version]), None)
    if version is None:
        return f"{name} is older than 2.15 and loads none of them"
    return f"{name} loads version {version}" + ("" if code >= TAKES_PATHS else ", by its name and LD_LIBRARY_PATH only")


def _start(plugin: ctypes.CDLL) -> str:
    """Why it cannot, or "". The logger lives for as long as the process, for the plugin may use it that long."""
    warnings: list[str] = []

    @_Logger
    def log(level: int, _: int, __: bytes, ___: int, ____: bytes, text: Optional[bytes]) -> None:
        if level == _WARN:
            warnings.append((text or b"").decode(errors="replace"))

    _loggers.append(log)
    net = _Net.in_dll(plugin, "ncclNetPlugin_v12")
    context = ctypes.c_void_p()
    if net.init(ctypes.byref(context), 0, None, log, None) == 0:
        return ""
    return f"HARP's plugin: {'; '.join(warnings) or 'init failed'}"
