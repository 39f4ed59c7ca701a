"""Gradients on their way: each has a slot in memory that the ranks of a host share, and is reduced there.

One copy in, when a gradient is ready and still in the cache; none out: p.grad itself becomes a view of the slot. The
slots of one dtype lie side by side in one slab, in the order in which backward usually makes gradients, so that the
core can fuse neighbours without copying. A slot belongs to an epoch; it keeps its slab alive, and so does each view.

A gradient that has been exchanged is overwritten by the next exchange: who keeps p.grad across steps must clone it.
"""
import ctypes
from array import array
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from lightcc import _core, request
from lightcc.adapter import adapter_of
from lightcc.common.exceptions import HorovodInternalError
from lightcc.torch.compression import CastCompressor, Compression

_ALIGNMENT = 64  # no two slots share a cache line
_strided, _start = torch.strided, _core.start  # looked up for each gradient


class Gradient:
    """One parameter's gradient."""

    __slots__ = ("parameter", "name", "optimizer", "group", "passes_left", "sent", "slot", "address", "dtype",
                 "prepared", "context", "__weakref__")

    def __init__(self, parameter: torch.Tensor, name: str):
        self.parameter = parameter
        self.name = name
        self.optimizer: Any = None                 # whose gradient this is
        self.group: Optional[Group] = None
        self.passes_left = 1                       # backward passes until it is sent
        self.sent = False                          # since the last finish
        self.slot: Optional[torch.Tensor] = None   # of the parameter's shape and layout, in the wire's dtype
        self.address = 0                           # of the slot
        self.dtype: Optional[torch.dtype] = None   # of the slot, unless a user's compressor stands between
        self.prepared = 0                          # the core's id of its request, unless it is in a group
        self.context: Any = None                   # what a user's compressor needs to undo its work


class Group:
    """Gradients that are reduced as one unit, once the last of them is ready."""

    def __init__(self, name: str, members: List[Gradient]):
        self.name, self.members = name, members
        self.missing = len(members)
        self.pack: Optional[request.Pack] = None
        for member in members:
            member.group = self


class Exchange:
    """Reduces gradients over a process set. Used by one thread at a time."""

    def __init__(self, compression, op: int, prescale: float, postscale: float, sparse_as_dense: bool, process_set):
        self._compression = compression
        self._casts = compression is Compression.none or (isinstance(compression, type) and
                                                          issubclass(compression, CastCompressor))
        self._request = op, prescale, postscale
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._gradients: List[Gradient] = []
        self._without_slot: List[Gradient] = []
        self._handles = array("q")  # of what was sent since the last finish
        self._epoch = 0  # of the slots

    def add(self, gradients: Iterable[Gradient]) -> None:
        for gradient in gradients:
            self._gradients.append(gradient)
            self._without_slot.append(gradient)

    def make_ready(self) -> None:
        """Must come before send, whenever gradients were added or another epoch may have begun.

        HorovodInternalError if gradients were in flight when the last epoch ended.
        """
        if self._without_slot or self._epoch != _core.epoch:
            self._make_slots()

    def send(self, gradient: Gradient) -> None:
        """Copies the gradient into its slot and starts the reduction; a parameter without gradient sends zeros."""
        grad = gradient.parameter.grad
        # Every gradient of every step comes by here: a plain one costs one copy and one call of the core.
        if grad is not None and grad.dtype is gradient.dtype and grad.layout is _strided and not grad.requires_grad:
            if grad.data_ptr() != gradient.address:  # else it accumulated in its slot
                gradient.slot.copy_(grad)
                grad.data = gradient.slot  # frees its memory, so that backward's next gradient is made where it is hot
        else:
            self._fill(gradient, grad)
        self._start(gradient)

    def _start(self, gradient: Gradient) -> None:
        """Starts the reduction of what is in the slot."""
        group = gradient.group
        if group is None:
            handle = _start(gradient.prepared)
            if handle < 0:
                raise _core.error(-handle)
            self._handles.append(handle)
        else:
            if group.missing == 1:
                self._handles.append(request.submit_pack(_core.ALLREDUCE, group.pack, group.pack.addresses, group.name,
                                                         self._process_set, 0, *self._request))
            group.missing -= 1
        gradient.sent = True

    def finish(self) -> None:
        """Waits for all that was sent, and makes each p.grad the reduced gradient. Raises the first error."""
        sent = [gradient for gradient in self._gradients if gradient.sent]
        failure = self.drain()
        if failure is not None:
            raise failure
        self._deliver_all(sent)

    def drain(self) -> Optional[Exception]:
        """Waits for all that was sent and forgets it; returns the first error."""
        failure: Optional[Exception] = None
        if self._handles:
            try:
                _core.finish_all(self._handles)
            except (HorovodInternalError, ValueError) as error:
                failure = error
            if self._epoch != _core.epoch or not _core.initialized():
                failure = failure or HorovodInternalError("lightcc was shut down while gradients were in flight.")
        self._forget()
        return failure

    def __del__(self):
        if self._epoch != _core.epoch:
            return
        slots = [gradient.slot for gradient in self._gradients]
        for handle in self._handles:  # the core still works on the slots
            request.later(handle, slots, None)
        for gradient in self._gradients:
            if gradient.prepared:
                _core.discard(gradient.prepared)

    # Slots

    def _make_slots(self) -> None:
        if self._epoch != _core.epoch:
            failure = self.drain()
            self._epoch = _core.epoch
            self._without_slot = list(self._gradients)
            if failure is not None:
                raise failure
        by_dtype: Dict[torch.dtype, List[Tuple[Gradient, torch.Tensor]]] = {}
        for gradient in reversed(self._without_slot):
            form = self._wire_form(gradient.parameter)
            by_dtype.setdefault(form.dtype, []).append((gradient, form))
        for entries in by_dtype.values():
            self._make_slab(entries)
        for group in {id(g.group): g.group for g in self._without_slot if g.group is not None}.values():
            group.members.sort(key=lambda member: member.address)  # side by side, as the core looks for neighbours
            group.pack = request.Pack([_described(member) for member in group.members])
        self._without_slot = []

    def _wire_form(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor without memory, of the dtype, shape and layout in which the parameter's gradient travels."""
        if not parameter.is_cpu:
            raise ValueError(f"A parameter is on {parameter.device}; this version of lightcc works on CPU tensors "
                             "only.")
        with torch.no_grad():
            example = torch.empty_like(parameter, device="meta" if self._casts else None)  # keeps any dense layout
            return torch.empty_like(self._compression.compress(example)[0], device="meta")

    def _make_slab(self, entries: Sequence[Tuple[Gradient, torch.Tensor]]) -> None:
        sizes = [form.numel() * form.element_size() for _, form in entries]
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        slab = _core.alloc(offsets[-1] + _ALIGNMENT)  # + : the last slot may be empty, and yet has an address
        for (gradient, form), offset in zip(entries, offsets):
            gradient.slot = torch.empty_like(form, device="cpu") if form.numel() == 0 else torch.frombuffer(
                slab, dtype=form.dtype, count=form.numel(), offset=offset).as_strided(form.shape, form.stride())
            gradient.address = ctypes.addressof(slab) + offset
            gradient.dtype = gradient.slot.dtype if self._casts else None
            if gradient.group is None:
                gradient.prepared = self._prepare(gradient)

    def _prepare(self, gradient: Gradient) -> int:
        address, dtype, shape = _described(gradient)
        op, prescale, postscale = self._request
        dimensions = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        return _core.prepare(_core.ALLREDUCE, gradient.name.encode(), self._process_set.process_set_id, address,
                             address, dtype, len(shape), ctypes.addressof(dimensions), op, 0, prescale, postscale,
                             None, 0)

    def _forget(self) -> None:
        del self._handles[:]
        for gradient in self._gradients:
            gradient.sent = False
            if gradient.group is not None:
                gradient.group.missing = len(gradient.group.members)

    # Between p.grad and slot

    def _fill(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Makes the slot what this rank sends, whatever form its gradient has."""
        if grad is None:
            gradient.slot.zero_()
            return
        if grad.requires_grad:  # create_graph: the gradient has a history, a slot never
            grad = grad.detach()
        if grad.layout is not _strided:
            if not self._sparse_as_dense:
                raise ValueError(f"The gradient of {gradient.name} is sparse; lightcc reduces dense gradients. Use "
                                 "DistributedOptimizer(..., sparse_as_dense=True) or a layer with sparse=False.")
            grad = grad.to_dense()
        if not self._casts:
            grad, gradient.context = self._compression.compress(grad)
        if grad.data_ptr() != gradient.address:
            gradient.slot.copy_(grad)

    def _deliver_all(self, sent: Sequence[Gradient]) -> None:
        for gradient in sent:
            grad = gradient.parameter.grad
            if grad is None or grad.layout is not _strided or grad.data_ptr() != gradient.address:
                if gradient.parameter.requires_grad:
                    self._deliver(gradient, grad)

    def _deliver(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Makes p.grad, which is not the slot, the reduced gradient."""
        parameter, slot = gradient.parameter, gradient.slot
        if not self._casts:
            parameter.grad = self._compression.decompress(slot, gradient.context)
        elif grad is None or grad.requires_grad or grad.layout is not _strided:
            parameter.grad = slot.detach().to(parameter.dtype)
        elif slot.dtype != grad.dtype:
            grad.copy_(slot)
        else:
            grad.data = slot  # not a new tensor: who holds this p.grad already sees the reduced values


def _described(gradient: Gradient) -> Tuple[int, int, List[int]]:
    """Address, dtype and shape of a slot; dimensions in the order of memory, so that other layouts are a mismatch."""
    slot = gradient.slot
    order = sorted(range(slot.dim()), key=lambda i: -slot.stride(i))
    return gradient.address, adapter_of(slot).describe(slot.new_empty(0))[1], [slot.shape[i] for i in order]
