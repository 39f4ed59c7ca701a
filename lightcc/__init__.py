"""lightcc: trains one model on many processes, with Horovod's API.

    import lightcc.torch as hvd

This package imports no framework: a framework is imported only by its own package (lightcc.torch, lightcc.numpy).
"""
from lightcc._version import __version__

__all__ = ["__version__", "run"]


def __getattr__(name: str):
    if name == "run":  # the launcher is not needed inside a training process
        from lightcc.runner import run
        return run
    raise AttributeError(f"module 'lightcc' has no attribute {name!r}")
