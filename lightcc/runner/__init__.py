"""Starts jobs: lightccrun on the command line, run() in Python. Needs neither a framework nor the native library."""

__all__ = ["run"]


def __getattr__(name: str):
    if name == "run":  # a training process imports runner.elastic, and needs no launcher
        from lightcc.runner.api import run
        return run
    raise AttributeError(f"module 'lightcc.runner' has no attribute {name!r}")
