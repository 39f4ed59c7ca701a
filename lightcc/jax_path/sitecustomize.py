"""Every Python imports this as it starts, if lightcc's jax_path leads PYTHONPATH, as `lightccrun --jax` has it. When
the program imports jax, lightcc.jax is imported behind it.

It then gives its place to the sitecustomize that this Python has without it. If there is none, the import of it raises
what the interpreter expects in that case.
"""
import importlib
import os
import sys
from importlib.machinery import PathFinder


class _BehindJax:
    """Finds jax once, and has its loader import lightcc.jax when jax is whole."""

    def find_spec(self, name, path=None, target=None):
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        # jaxlib reads it when it is loaded (lightcc/jax/collectives.py).
        os.environ.setdefault("MPITRAMPOLINE_LIB", os.path.join(os.path.dirname(folder), "liblightcc_jax.so"))
        execute = spec.loader.exec_module

        def then_ours(module):
            execute(module)
            # A process that this one starts, such as a worker that reads data, is no rank.
            os.environ.pop("LIGHTCC_JAX", None)
            importlib.import_module("lightcc.jax")

        spec.loader.exec_module = then_ours
        return spec


folder = os.path.dirname(__file__)
sys.path[:] = [other for other in sys.path if other != folder]
del sys.modules["sitecustomize"]
if os.environ.get("LIGHTCC_JAX") == "1":
    sys.meta_path.insert(0, _BehindJax())
import sitecustomize  # noqa: E402,F401
