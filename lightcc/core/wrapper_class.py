"""The class of an object that wraps one of a framework's, in the shape that programs know from Horovod: the class of
what is wrapped is its one base, and gives it its name."""
import os
import sys
import types
from typing import Any

import lightcc


def wrapper_class(plain: type, members: type, module: str, plain_as: str = "_as_plain", **attributes: Any) -> Any:
    """Makes a subclass of a plain class.

    members: a class whose methods, properties and slots, and those of its bases, are put into the new one. It is no
    base of that, so they find the plain class's own by self._as_plain, and not by super(). module: what the class says
    it is from, of lightcc; by Horovod's name if the program has imported that. plain_as: another name than
    _as_plain, where the plain class may be made by this function too. attributes: more of the class.

    >>> class Loud:
    ...     def speak(self): return self._as_plain.speak().upper()
    >>> class Dog:
    ...     def speak(self): return "bark"
    >>> cls = wrapper_class(Dog, Loud, "lightcc.numpy"); cls.__name__, cls.__bases__ == (Dog,), cls().speak()
    ('Dog', True, 'BARK')
    """
    kinds = members.__mro__[-2::-1]  # from the first base but object
    slots = tuple(name for kind in kinds for name in vars(kind).get("__slots__", ()))
    copied = {name: member for kind in kinds for name, member in vars(kind).items()
              if name not in slots and (not name.startswith("__") or isinstance(member, types.FunctionType))}
    cls = type(plain.__name__, (plain,), {
        **copied, **attributes, "__slots__": slots, "__module__": _imported_as(module),
        "_wrapper_members": members, plain_as: property(lambda self: super(cls, self))})
    return cls


def is_made_with(members: type, thing: Any) -> bool:
    """Whether a thing is of a class that wrapper_class has made with these members, or with a subclass of them, at once
    or around another one.

    >>> is_made_with(object, 3)
    False
    """
    return any(issubclass(vars(cls)["_wrapper_members"], members) for cls in type(thing).__mro__
               if "_wrapper_members" in vars(cls))


def _imported_as(name: str) -> str:
    """horovod.x for a module lightcc.x, if the program has imported this package as Horovod."""
    ours = os.path.join(lightcc.__path__[0], "horovod_path", "horovod", "__init__.py")
    is_ours = getattr(sys.modules.get("horovod"), "__file__", None) == ours
    return "horovod" + name[len("lightcc"):] if is_ours else name
