"""In which order the streams of a GPU run around an operation of torch.distributed or DistributedDataParallel.

1. The operation reads behind what the stream that was current at its submission had been given.
2. That stream does not go on behind its outputs by itself (lib.UNORDERED): backward runs beside a bucket's exchange.
3. Whoever waits for the operation has its current stream go on behind the outputs. The host waits for no GPU.
4. Where nobody waits, a stream of lightcc's own does what is left to do, such as copies to where torch wants results.
5. Memory that another stream than that of the submission has used is not used again before that stream is done with it.
"""
import contextlib
import functools
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence

import torch

from lightcc.core import lib, request


class Streams:
    """What is asked of CUDA. Tests put others in its place, for GPUs that PyTorch does not know."""

    def mark(self, device: int) -> Any:
        """An event that is reached when the current stream has done all it was given so far."""
        return torch.cuda.current_stream(device).record_event()

    def follow(self, device: int, event: Any) -> None:
        """Has the current stream wait for the event."""
        torch.cuda.current_stream(device).wait_event(event)

    def keep(self, device: int, tensors: Sequence[torch.Tensor]) -> None:
        """Their memory is not used again before the current stream has done all it was given until they are dropped."""
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor.layout is torch.strided:  # one that is sparse gets new memory, by this stream: see follow()
                tensor.record_stream(stream)

    @contextlib.contextmanager
    def own(self, device: int) -> Iterator[None]:
        """Makes a stream of lightcc's own the current one."""
        with torch.cuda.device(device), torch.cuda.stream(_own_stream(device)):  # else leaving makes a context on GPU 0
            yield

    def of_future(self, device: int) -> List[torch.device]:
        """The devices of a future whose value is on this one."""
        return [torch.device("cuda", device)]


@functools.lru_cache(maxsize=None)
def _own_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


streams = Streams()


class DeviceOrder:
    """That of one operation, made by the thread that has submitted it. Later, one thread at a time may call."""

    def __init__(self, place: lib.Place, tensors: Sequence[torch.Tensor]):
        """tensors: all that the operation reads and writes."""
        self._place, self._tensors = place, tensors
        self._begun_on = place.now().stream
        self._ended_on: Optional[int] = None
        self._event: Any = None
        self._made: List[torch.Tensor] = []  # what sparse outputs are made of, by the stream of end()

    def end(self, handle: int, finish: Optional[Callable[[int], Any]]) -> None:
        """Of an operation that has succeeded: finish(handle) runs on the calling thread's stream, behind the outputs.
        """
        now = self._place.now().stream
        request.order(handle)
        try:
            if finish is not None:
                finish(handle)
        finally:
            if now != self._begun_on:
                streams.keep(self._place.device, self._tensors)
            self._made = [part for tensor in self._tensors if tensor.layout is torch.sparse_coo
                          for part in (tensor._indices(), tensor._values())]
            self._tensors = ()
            self._event, self._ended_on = streams.mark(self._place.device), now

    def follow(self) -> None:
        """The calling thread's stream goes on behind end()."""
        if self._event is not None and self._place.now().stream != self._ended_on:
            streams.follow(self._place.device, self._event)
            if self._made:
                streams.keep(self._place.device, self._made)

    def own_stream(self) -> ContextManager:
        """For a thread that has no stream of the program's."""
        return streams.own(self._place.device)

    def devices(self) -> List[torch.device]:
        """Of a future of the operation."""
        return streams.of_future(self._place.device)


def order_of(handle: int, tensors: Sequence[torch.Tensor]) -> Optional[DeviceOrder]:
    """None for a request of the CPU, and for one that is done, behind which its stream goes on already."""
    place = request.place_of(handle)
    return None if place is None else DeviceOrder(place, tensors)


def own_stream_of(order: Optional[DeviceOrder]) -> ContextManager:
    return contextlib.nullcontext() if order is None else order.own_stream()
