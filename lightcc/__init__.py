"""lightcc: trains one model on many processes, with Horovod's API.

    import lightcc.torch as hvd

This package imports no framework: importing lightcc.torch imports PyTorch, lightcc.tensorflow TensorFlow, lightcc.numpy
neither.
"""
from lightcc._version import __version__

__all__ = ["__version__", "fusion_plan", "run"]


def fusion_plan() -> str:
    """The fusion plans in force on this rank, a line a bucket; "" if there are none.

    After three equal steps the gradients of an optimizer or a tape have one; docs/design.md tells how it is made and
    when it ends. Inside a line stand how many tensors travel together, and the first and the last of them in memory.
    HorovodInternalError before init().

    >>> import lightcc; lightcc.fusion_plan()
    ''
    """
    from lightcc.core import lib
    return lib.describe("fusion_plan")


def __getattr__(name: str):
    if name == "run":  # the launcher is not needed inside a training process
        from lightcc.runner import run
        return run
    hint = "" if name.startswith("_") else (": Horovod's functions are in the module of your framework, "
                                            "import lightcc.torch as hvd (or lightcc.tensorflow, "
                                            "lightcc.tensorflow.keras, lightcc.keras, lightcc.numpy)")
    raise AttributeError(f"module 'lightcc' has no attribute {name!r}{hint}")
