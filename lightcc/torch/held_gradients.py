"""Gradients whose prepared requests start together.

They wait here until they are so many bytes, or until backward ends, which only torch knows: to start many at once
costs less. What travels together the core decides. Small ones, and all of a GPU, are also copied into their slots
together.
"""
import contextlib
import weakref
from array import array
from typing import Callable, List, Optional, Tuple

import torch

from lightcc.core import lib
from lightcc.torch import changed_gradients
from lightcc.torch.gradient import Gradient
from lightcc.torch.spans import spanned

_SMALL_BYTES = 64 << 10
_BURST_BYTES = 1 << 20
_BURST_BYTES_OF_GPU = 16 << 20  # it makes gradients faster, and each start also costs calls of CUDA
_engine = torch.autograd.Variable._execution_engine


def is_copied_late(gradient: Gradient) -> bool:
    """Whether a gradient waits here to be copied with others. A large one of the CPU is copied while it is in the
    cache, and one of a group when it is ready."""
    return gradient.group is None and (gradient.stream is not None or gradient.bytes <= _SMALL_BYTES)


class HeldGradients:
    """The gradients that one reducer holds."""

    def __init__(self, handles: "array[int]", fill: Callable[[Gradient, torch.Tensor], None]):
        """handles: gets those of all that is started. fill: a method that copies a gradient which has not its slot's
        layout; it does not keep its object alive."""
        self._handles, self._fill = handles, weakref.WeakMethod(fill)
        self._gradients: List[Gradient] = []
        self._bytes = 0
        self._uncopied: List[Tuple[Gradient, torch.Tensor]] = []  # those of them that are not in their slots yet
        self._copied: List[Gradient] = []  # the others
        self._backward = -1  # torch's number of the backward pass at whose end they start at the latest

    def add(self, gradient: Gradient, grad: Optional[torch.Tensor] = None) -> None:
        """Starts the reduction of a gradient, mostly together with those after it.

        grad: a plain gradient that is still to be copied into its slot; None: it is there.
        """
        if not self._gradients:
            self._release_after_backward()
        self._gradients.append(gradient)
        if grad is not None:
            self._uncopied.append((gradient, grad))
        else:
            self._copied.append(gradient)
            if gradient.stream is not None:
                gradient.stream.follow()
        self._bytes += gradient.bytes
        if self._bytes >= (_BURST_BYTES if gradient.stream is None else _BURST_BYTES_OF_GPU):
            self.release()

    def release(self) -> None:
        """Starts all of them."""
        if self._gradients:
            self._start()

    @spanned("lightcc.send", lambda self: f"{len(self._gradients)} gradients, {self._bytes} bytes")
    def _start(self) -> None:
        self._copy()
        self._watch()
        held, self._gradients, self._bytes = self._gradients, [], 0
        first = len(self._handles)
        try:
            lib.start_all(array("q", [gradient.prepared for gradient in held]), self._handles)
        except Exception:
            self._gradients = held[len(self._handles) - first:]  # what was not started must not pass for reduced
            self._bytes = sum(gradient.bytes for gradient in self._gradients)
            raise
        finally:
            for gradient, handle in zip(held, self._handles[first:]):
                gradient.handle = handle

    def clear(self) -> None:
        del self._gradients[:]
        del self._uncopied[:]
        del self._copied[:]
        self._bytes = 0

    def _copy(self) -> None:
        """Copies gradients, which nobody has looked at since they were sent, into their slots."""
        uncopied = [(gradient, grad) for gradient, grad in self._uncopied if grad.data_ptr() != gradient.address]
        prepared, sources = array("q"), array("Q")
        for gradient, grad in uncopied:
            if grad.data_ptr() and gradient.has_layout(grad):
                prepared.append(gradient.prepared)
                sources.append(grad.data_ptr())
            else:
                with torch.no_grad(), contextlib.nullcontext() if gradient.stream is None else \
                        gradient.stream.as_current():
                    self._fill()(gradient, grad)
        if prepared:
            lib.fill_all(prepared, sources)
        for gradient, grad in uncopied:
            grad.data = gradient.slot

    def _watch(self) -> None:
        """From here on the program must not change them: see changed_gradients.watch, here for what is in its slot."""
        for gradient, grad in self._uncopied:
            gradient.outside = None
            try:
                gradient.count = grad._version
            except RuntimeError:  # made in torch.inference_mode()
                gradient.count = None
        for gradient in self._copied:
            changed_gradients.watch(gradient)
        self._uncopied, self._copied = [], []  # now only: what an exception has left must not pass for copied

    def _release_after_backward(self) -> None:
        """Sees to it that other ranks need not wait until this one comes to synchronize."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and backward != -1:
            self._backward = backward
            _engine.queue_callback(self.release)
