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
    if harp:
        more, harp_fault = nccl_plugin.report()
        return text + more, fault or harp_fault
    return text, fault


def _usable(module: str) -> bool:
    """Whether the framework is installed and lightcc has a package for it."""
    return all(importlib.util.find_spec(name) for name in (f"lightcc.{module}", module))


def _section(title: str, rows: Iterable[tuple[str, object]]) -> str:
    return f"\n{title}:\n" + "".join(f"    [{'X' if there else ' '}] {name}\n" for name, there in rows)
