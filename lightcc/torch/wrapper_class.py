"""The class of an optimizer that DistributedOptimizer has made, in the shape that programs know from Horovod."""
import types

from lightcc import as_horovod


def class_of(plain: type, mixin: type) -> type:
    """A class with the mix-in's methods whose first base is the plain optimizer's class, of which programs make classes
    of their own. Those that run as Horovod also look for that word in the text of the class.

    In the mix-in, super(self._made, self) has the plain optimizer's methods.

    >>> made = class_of(torch.optim.SGD, type("Mixin", (), {"step": lambda self: "mine"}))
    >>> made.__name__, made.__bases__[0] is torch.optim.SGD, made.step(None)
    ('SGD', True, 'mine')
    """
    methods = {name: value for base in reversed(mixin.__mro__[:-1]) for name, value in vars(base).items()
               if not name.startswith("__") or isinstance(value, types.FunctionType)}
    module = as_horovod.name_of_module("lightcc.torch.optimizer")
    made = type(plain.__name__, (plain, mixin), {**methods, "__module__": module})
    made._made = made  # type: ignore[attr-defined]
    return made
