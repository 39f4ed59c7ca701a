"""The function of run() and its arguments as pickles, and which part of them cannot be pickled."""

import functools
import inspect
import io
import os
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Callable, NamedTuple, Optional

_DEEPEST = 20  # of parts in parts


def check(func: Any, args: Any, kwargs: Any) -> None:
    """Raises TypeError for what cannot be a call func(*args, **kwargs)."""
    if not callable(func):
        raise TypeError(f"run: func is {func!r:.60}, of type {type(func).__name__}, and cannot be called; to run f(3) "
                        "on each rank say run(f, args=(3,))")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"run: args is {args!r:.60}, of type {type(args).__name__}; a tuple is expected, as (3,)")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"run: kwargs is {kwargs!r:.60}, of type {type(kwargs).__name__}; a dict is expected")


def write(file: BinaryIO, func: Callable[..., Any], args: Iterable[Any], kwargs: Optional[Mapping[str, Any]]) -> None:
    """Raises TypeError, which names the variable, if one of them cannot be pickled."""
    import cloudpickle  # here, so that starting lightccrun does not pay for it

    # First: func may come from a module that only our path finds. "" is where we work, whatever -m makes of it.
    pickle.dump([os.path.abspath(path) for path in sys.path if isinstance(path, str)], file)
    args = tuple(args)
    try:
        cloudpickle.dump((func, args, dict(kwargs or {})), file)
    except Exception as error:
        parts = [*(_Part(f"args[{i}]", value) for i, value in enumerate(args)),
                 *(_Part(f"kwargs[{name!r}]", value) for name, value in (kwargs or {}).items()),
                 _Part(_name_of(func), func)]
        found = _culprit(parts)
        if found is None:  # it is the file's
            raise
        part, why = found
        user = f", which {part.user} uses" if part.user else ""
        raise TypeError(f"run: {part.name}, of type {type(part.value).__name__}{user}, cannot be pickled and so cannot "
                        f"go to the ranks: {why}. Make it inside the function, on each rank") from error


class _Part(NamedTuple):
    name: str
    value: Any
    user: str = ""  # the function whose variable it is


class _Nowhere(io.RawIOBase):
    def write(self, chunk: Any) -> int:
        return len(chunk)


def _culprit(parts: Iterable[_Part], depth: int = 0) -> Optional[tuple[_Part, Exception]]:
    """The smallest part within the first of these that cannot be pickled, and why."""
    for part in parts:
        if error := _error(part.value):
            return (_culprit(_parts(part), depth + 1) if depth < _DEEPEST else None) or (part, error)
    return None


def _error(value: Any) -> Optional[Exception]:
    import cloudpickle

    try:
        cloudpickle.dump(value, _Nowhere())
    except Exception as error:
        return error
    return None


def _parts(whole: _Part) -> Iterator[_Part]:
    name, value, user = whole
    if isinstance(value, types.FunctionType):
        used, user = inspect.getclosurevars(value), _name_of(value)
        inner = [*used.nonlocals.items(), *used.globals.items(), *(value.__kwdefaults__ or {}).items(),
                 *((f"default {i}", default) for i, default in enumerate(value.__defaults__ or ()))]
        name = ""
    elif isinstance(value, types.MethodType):
        inner = [(".__self__", value.__self__)]
    elif isinstance(value, functools.partial):
        inner = [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    elif isinstance(value, Mapping):
        inner = [(f"[{key!r:.40}]", one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(f"[{index}]", one) for index, one in enumerate(value)]
    else:
        inner = [(f".{attribute}", one) for attribute, one in getattr(value, "__dict__", {}).items()]
    for suffix, one in inner:
        yield _Part(name + suffix, one, user)


def _name_of(func: Callable[..., Any]) -> str:
    return f"{getattr(func, '__qualname__', type(func).__qualname__)}()"
