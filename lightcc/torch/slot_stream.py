"""In which order the streams of a GPU use the slots of gradients.

A prepared request keeps the stream that was the current one when its slot was made: it reads after what that stream has
been given, and that stream goes on behind its outputs. Backward and step may work on other streams, so these are
ordered around it. The host waits for none of them.
"""
import contextlib
from typing import Optional

import torch

from lightcc.core import lib
from lightcc.core.adapter import adapter_of
from lightcc.torch import slots

# cudaStream_t of the current stream of GPU i: a tenth of what current_stream() takes.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream)


class SlotStream:
    """The stream of slots that were made together on one GPU."""

    def __init__(self, slot: torch.Tensor):
        self.place: lib.Place = adapter_of(slot).describe(slot.detach().as_strided((1,), (1,)))[3]
        self._index = slot.device.index
        self._stream = torch.cuda.current_stream(slot.device)
        self._number = self._stream.cuda_stream

    def is_current(self) -> bool:
        """Whether the calling thread works on it."""
        return _current_stream(self._index) == self._number

    def follow(self) -> None:
        """Must come between the copy into a slot and the start of its request, on the stream that copies."""
        if not self.is_current():
            self._stream.wait_stream(torch.cuda.current_stream(self._index))

    def lead(self) -> None:
        """Must come between the end of a request and the use of its slot, on the stream that uses it."""
        if not self.is_current():
            torch.cuda.current_stream(self._index).wait_stream(self._stream)

    def as_current(self):
        """A context in which the calling thread works on it."""
        return contextlib.nullcontext() if self.is_current() else torch.cuda.stream(self._stream)


def stream_of(slot: torch.Tensor) -> Optional[SlotStream]:
    """None for a slot on the CPU."""
    return None if slots.device_of(slot).type == "cpu" else SlotStream(slot)
