"""Starts jobs: lightccrun on the command line, run() in Python. Needs neither a framework nor the native library."""

from lightcc.runner.api import run

__all__ = ["run"]
