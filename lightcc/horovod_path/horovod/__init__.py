"""The top module of Horovod, provided by lightcc (lightcc/as_horovod.py).

It is also found where that module was not loaded at the start: by a Python without site, or one that has another
sitecustomize before ours.
"""
import importlib

from lightcc import as_horovod

as_horovod.install()
__version__ = as_horovod.version()
__path__ = []  # nothing lies here: what is below is lightcc's


def __getattr__(name: str):
    if name == "run":  # the launcher is not needed inside a training process
        from lightcc import run
        return run
    if name in ("common", "runner"):  # Horovod's top module has them imported
        return importlib.import_module(f"horovod.{name}")
    raise AttributeError(f"module 'horovod' (provided by lightcc) has no attribute {name!r}")
