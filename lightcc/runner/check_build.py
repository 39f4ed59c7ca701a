"""--check-build: what can be used here, in the layout that scripts know from horovodrun."""

import importlib.util
from collections.abc import Iterable

from lightcc._version import __version__
from lightcc.launch import nccl_plugin

FRAMEWORKS = (("TensorFlow", "tensorflow"), ("PyTorch", "torch"), ("MXNet", "mxnet"), ("NumPy", "numpy"))


def report(harp: bool = False) -> tuple[str, str]:
    """The text, and what is wrong with this installation ("" if nothing is). Finds frameworks without importing
    them; loads the library. With `harp` also on NCCL's plugin."""
    fault, built = "", {}
    try:
        from lightcc.core.basics import HorovodBasics

        built = {name: bool(getattr(HorovodBasics(__file__), f"{name}_built")())
                 for name in ("mpi", "gloo", "nccl", "ddl", "ccl")}
    except ImportError as error:
        fault = str(error)
    works = not fault
    text = f"lightcc v{__version__}:\n"
    text += _section("Available Frameworks", ((name, works and _usable(module)) for name, module in FRAMEWORKS))
    text += _section("Available Controllers", [("MPI", built.get("mpi")),
                                                ("Gloo (lightcc's own controller)", built.get("gloo"))])
    text += _section("Available Tensor Operations", [
        *((name.upper(), built.get(name)) for name in ("nccl", "ddl", "ccl", "mpi")),
        ("Gloo (by the two that follow)", built.get("gloo")),
        ("lightcc shared memory", works), ("lightcc TCP between hosts", works),
        ("lightcc HARP between hosts (LIGHTCC_NET=harp; mostly slower than TCP: docs/harp.md)", works)])
    if works:
        text += _gpus()
    if harp:
        more, harp_fault = nccl_plugin.report()
        return text + more, fault or harp_fault
    return text, fault


def _gpus() -> str:
    """What there is for tensors of GPUs, and how they travel."""
    from lightcc.core import lib, nccl_library

    rows = [(line[1:], line[0] == "+") for line in lib.describe("gpus").splitlines()]
    path = nccl_library.path()
    try:
        version = nccl_library.version(path) if path else 0
        why = f"{_dotted(version)} ({path})" if version else "was not found"
    except OSError as error:
        version, why = 0, str(error)
    if 0 < version < nccl_library.LEAST_VERSION:
        why += f" is too old: lightcc needs {_dotted(nccl_library.LEAST_VERSION)}"
    rows.append((f"NCCL {why}", version >= nccl_library.LEAST_VERSION))
    (_, driver), (_, nvrtc), (_, nccl) = rows
    way = "by NCCL, or through the host with LIGHTCC_NCCL=0"
    if not driver:
        way = "not at all without a CUDA driver that can be used"
    elif not nvrtc or not nccl:
        way = f"through the host, since {'NCCL' if nvrtc else 'NVRTC'} cannot be used"
    return _section("Tensors of GPUs", rows) + f"    They travel {way}.\n"


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _usable(module: str) -> bool:
    """Whether the framework is installed and lightcc has a package for it."""
    return all(importlib.util.find_spec(name) for name in (f"lightcc.{module}", module))


def _section(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return f"\n{title}:\n" + "".join(f"    [{'X' if there else ' '}] {name}\n" for name, there in rows)
