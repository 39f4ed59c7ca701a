"""Spans around what lightcc does in the program's own threads, for torch.profiler and, by NVTX, for Nsight Systems.

Where neither is on, a spanned call costs a question more (bench/observing.py). NVTX is used through the library that is
there at run time, if a tool has started the program (lightcc.core.nvtx_library).
"""
import functools
from typing import Any, Callable, Optional

import torch

from lightcc.core import nvtx_library

_profiles = torch._C._autograd._profiler_enabled
_record = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", torch.autograd.profiler.record_function)


def spanned(name: str, details: Optional[Callable[[Any], str]] = None) -> Callable[[Callable], Callable]:
    """A decorator of methods: each call is a span of this name while somebody records them.

    details: what to say behind the name, from the method's object; asked only then.

    >>> class Sender:
    ...     @spanned("lightcc.send", lambda self: "3 gradients")
    ...     def send(self): return 3
    >>> with torch.profiler.profile() as profile: Sender().send()
    3
    >>> [event.name for event in profile.events() if event.name.startswith("lightcc")]
    ['lightcc.send: 3 gradients']
    """
    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def call(self, *arguments, **named):
            if _asks_nvtx:
                return _ranged(name if details is None else f"{name}: {details(self)}", method, self, *arguments,
                               **named)
            if _profiles():
                with _record(name if details is None else f"{name}: {details(self)}"):
                    return method(self, *arguments, **named)
            return method(self, *arguments, **named)
        return call
    return decorate


_asks_nvtx = nvtx_library.is_asked()


def _ranged(text: str, method: Callable, *arguments: Any, **named: Any) -> Any:
    """A range of NVTX and, as a profiler may record too, a span."""
    ranges = nvtx()
    if ranges is not None:
        ranges.push(text.encode())
    try:
        if not _profiles():
            return method(*arguments, **named)
        with _record(text):
            return method(*arguments, **named)
    finally:
        if ranges is not None:
            ranges.pop()


@functools.lru_cache(maxsize=1)
def nvtx() -> Optional[nvtx_library.Nvtx]:
    """PyTorch's own NVTX, in its builds for CUDA, or that of the system. None: neither is there, or ranges are turned
    off. Called after init."""
    if nvtx_library.is_disabled():
        return None
    if torch.version.cuda is not None and hasattr(torch._C, "_nvtx"):
        return nvtx_library.Nvtx(lambda text: torch._C._nvtx.rangePushA(text.decode()), torch._C._nvtx.rangePop)
    return nvtx_library.find()
