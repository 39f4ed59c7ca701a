"""In which order the streams of a GPU use the slots of gradients.

A prepared request keeps the stream that was the current one when its slot was made: it reads after what that stream has
been given, and that stream goes on behind its outputs. Backward and step may work on other streams, so these are
ordered around it. The host waits for none of them.
"""
from typing import Optional

import torch

from lightcc import _core
from lightcc.adapter import adapter_of
from lightcc.torch import slots


class SlotStream:
    """The stream of slots that were made together on one GPU."""

    def __init__(self, slot: torch.Tensor):
        self.place: _core.Place = adapter_of(slot).describe(slot.detach().as_strided((1,), (1,)))[3]
        self._device = slot.device
        self._stream = torch.cuda.current_stream(slot.device)

    def follow(self) -> None:
        """Must come between the copy into a slot and the start of its request, on the stream that copies."""
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)

    def lead(self) -> None:
        """Must come between the end of a request and the use of its slot, on the stream that uses it."""
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)


def stream_of(slot: torch.Tensor) -> Optional[SlotStream]:
    """None for a slot on the CPU."""
    return None if slots.device_of(slot).type == "cpu" else SlotStream(slot)
