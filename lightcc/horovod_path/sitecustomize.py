"""Every Python imports this as it starts, if lightcc's horovod_path leads PYTHONPATH (lightcc/as_horovod.py).

It then gives its place to the sitecustomize that this Python has without it. If there is none, the import of it raises
what the interpreter expects in that case.
"""
import os
import sys

folder = os.path.dirname(__file__)
sys.path[:] = [other for other in sys.path if other != folder]
del sys.modules["sitecustomize"]
try:
    from lightcc import as_horovod
    as_horovod.install()
except (ImportError, SyntaxError):  # some other Python, without lightcc: horovod/__init__.py tells whoever imports it
    try:
        import sitecustomize
    finally:
        sys.path[:0] = [folder]
else:
    import sitecustomize  # noqa: F401
