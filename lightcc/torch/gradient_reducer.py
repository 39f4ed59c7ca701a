"""Reduces the gradients of an optimizer: each has a slot in memory that the ranks of a host share, or in that of its
GPU, and is reduced there.

One copy in, when a gradient is ready and still in the cache, or on a GPU together with others; none out: p.grad itself
becomes a view of the slot. The slots of one dtype lie side by side in one slab, in the order in which backward usually
makes gradients, so that the core can fuse neighbours without copying. A slot belongs to an epoch; it keeps its slab
alive, and so does each view. A gradient that has been reduced is overwritten by the next reduction: who keeps p.grad
across steps must clone it. A p.grad that is a part of the program's own memory stays there: it is copied in and out.

Sparse gradients are gathered instead (lightcc.torch.sparse). All ranks must send a gradient in one form, and a rank
without gradient cannot tell which. So all ranks settle a form together, when they first synchronize with a gradient of
that parameter on any of them: sparse if no rank has it dense. Until then a dense gradient goes at once, as zeros can
follow it, and a sparse one waits. Once it is settled each rank brings what it has into that form. A settled form lasts
until a join is over, as ranks that had joined do not know it, or the epoch.

With sparse_as_dense a sparse gradient travels as a dense one, and ends as a sparse one again, as its optimizer may take
no other. Beside it travels one byte for each place (for an embedding: row) that says whether this rank has an entry
there: a gradient that is zero is none that is absent to an optimizer with momentum.
"""
from array import array
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from lightcc.compress.compressors import CoreCompressor
from lightcc.core import lib, ops, request
from lightcc.core.adapter import MixedDevicesError
from lightcc.core.exceptions import HorovodInternalError
from lightcc.torch import changed_gradients, slot_stream, slots, sparse
from lightcc.torch.compression_switch import SetAside
from lightcc.torch.gradient import Gradient, Group, Names, described, in_order_of_slots
from lightcc.torch.gradient_compression import GradientCompression
from lightcc.torch.handles import SeenHandles
from lightcc.torch.held_gradients import HeldGradients, is_copied_late
from lightcc.torch.spans import spanned
from lightcc.torch.wire import Wire

_ALONE_BYTES = 64 << 20  # a slot of so many gains nothing by travelling with its neighbours
_strided = torch.strided  # looked up for each gradient
_names = Names()


class GradientReducer:
    """Reduces gradients over a process set. Used by one thread at a time."""

    def __init__(self, compression, op: int, prescale: float, postscale: float, sparse_as_dense: bool, process_set):
        self._request = op, prescale, postscale
        self.compressed = GradientCompression.of(compression, self._request, process_set)
        self._set_compression(compression)
        self._aside = SetAside()
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._set = request.new_set()  # of the requests of one compression
        self.gradients: List[Gradient] = []
        self._without_slot: List[Gradient] = []
        self._unsettled: List[Gradient] = []
        self._gathers: List[Tuple[Gradient, Callable[[], torch.Tensor]]] = []  # sent since the last finish
        self._joins = lib.joins  # when forms were settled
        self._handles = array("q")  # of what was sent since the last finish
        self._held = HeldGradients(self._handles, self._fill)
        self._seen = SeenHandles()
        self._epoch = 0  # of the slots
        self._streams: Dict[torch.device, slot_stream.SlotStream] = {}  # of the slots on GPUs
        self._device: Optional[torch.device] = None  # of the slots
        self._number = 0  # among the reducers of this epoch that have names in common
        changed_gradients.reducers.add(self)

    def add(self, gradients: Iterable[Gradient]) -> None:
        for gradient in gradients:
            self.gradients.append(gradient)
            self._without_slot.append(gradient)
            self._unsettled.append(gradient)

    def keep_local(self, gradient: Gradient) -> None:
        """From now on send does nothing with this gradient, which is in no group and not on its way."""
        gradient.local, gradient.dtype = True, None
        for gradients in (self.gradients, self._without_slot, self._unsettled):
            if gradient in gradients:
                gradients.remove(gradient)
        if gradient.prepared and self._epoch == lib.epoch:
            lib.discard(gradient.prepared)
        gradient.prepared = 0

    def use(self, compression: Any) -> None:
        """Gradients travel by another compression from now on, on all ranks; nothing is on its way.

        compression: a Compressor, or the TopK or Int8 that this reducer was made with.
        """
        if compression is self.compression:
            return
        numbers = self._aside.exchange(self.compression, compression, self.gradients, (self._epoch, self._device),
                                       (self._set, self._number))
        self._set_compression(compression)
        if numbers is not None:
            self._set, self._number = numbers
        else:
            self._set = request.new_set()
            self._without_slot = list(self.gradients)

    def _set_compression(self, compression: Any) -> None:
        self._by_core = self.compressed is not None and isinstance(compression, CoreCompressor)
        self._wire = Wire(compression, self._by_core)

    @property
    def compression(self) -> Any:
        """By which gradients travel now."""
        return self._wire.compression

    def make_ready(self) -> None:
        """Must come before send, whenever gradients were added or another epoch may have begun.

        HorovodInternalError if gradients were in flight when the last epoch ended.
        """
        if self._joins != lib.joins and not any(gradient.sent for gradient in self.gradients):
            self._unsettle()
        if self._without_slot or self._epoch != lib.epoch:
            self._make_slots()
        elif self.gradients and slots.device_of(self.gradients[0].parameter) != self._device:
            self._move_slots()
        if self.compressed is not None and self._by_core:
            undecided = self._unsettled if self._sparse_as_dense else ()
            self.compressed.make_ready(self.gradients, undecided, self._prepare)

    def settle(self, sparse_dims_of_none: int) -> None:
        """Settles with the other ranks the form of gradients of which that has not been done.

        Must come once before finish, with nothing sent of what this rank has no gradient of. What no rank has a
        gradient of stays open, and travels as zeros, unless sparse_dims_of_none says that it be sparse and how.
        ValueError, on all ranks, if a gradient is sparse that cannot be.
        """
        # The ranks may have their parameters in different orders.
        open_ = sorted(self._unsettled, key=lambda gradient: gradient.name)
        if not open_:
            return
        mine = [(True, 0) if g.sent and not self._sparse_as_dense else sparse.form_of(g.parameter.grad) for g in open_]
        name = f"optimizer.step() (forms of the gradients, from {open_[0].name} on)"
        forms = sparse.agree(mine, name, self._process_set)
        settled = set()
        for gradient, (dense, dimensions) in zip(open_, forms):
            dimensions = dimensions or sparse_dims_of_none
            if dimensions and not dense:
                if self._request[0] not in sparse.SUMS and not self._sparse_as_dense:
                    raise ValueError(f"The gradient of {gradient.name} is sparse, and op is not Sum or Average: that "
                                     "needs the zeros too. Use DistributedOptimizer(..., sparse_as_dense=True) or a "
                                     "layer with sparse=False.")
                self._make_sparse(gradient, dimensions)
            if dimensions or dense:
                settled.add(id(gradient))
        self._unsettled = [gradient for gradient in self._unsettled if id(gradient) not in settled]

    def send(self, gradient: Gradient) -> None:
        """Copies the gradient into its slot and starts the reduction; a parameter without gradient sends zeros."""
        grad = gradient.parameter.grad
        # Every gradient of every step comes by here: a plain one costs a copy, or not even that.
        if grad is not None and grad.dtype is gradient.dtype and grad.layout is _strided and not grad.requires_grad \
                and grad._base is None:  # see is_part
            if gradient.copied_late and (gradient.stream is None or gradient.stream.is_current()):
                gradient.sent = True
                self._held.add(gradient, grad)
                return
            if grad.data_ptr() != gradient.address:  # else it accumulated in its slot
                try:
                    gradient.slot.copy_(grad)
                except RuntimeError:  # not of the slot's shape
                    self._fill(gradient, grad)
                grad.data = gradient.slot  # frees its memory, so that backward's next gradient is made where it is hot
            gradient.outside = None
            self._start(gradient)
        else:
            self._send_other(gradient, grad)

    def _send_other(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """send for what takes more than a copy."""
        if gradient.local:
            return
        gradient.outside = grad
        if gradient.sparse_dims and not self._sparse_as_dense:
            self._gather(gradient, grad)
        elif self._sparse_as_dense or grad is None or grad.layout is not torch.sparse_coo or \
                not any(waiting is gradient for waiting in self._unsettled):
            self._fill(gradient, grad)
            self._start(gradient)
            if gradient.sparse_dims:
                self._send_places(gradient, grad)

    def _start(self, gradient: Gradient) -> None:
        """Starts the reduction of what is in the slot, that of a group once all of it is there."""
        group = gradient.group
        if group is None:
            self._held.add(gradient)
        else:
            if gradient.stream is not None:
                gradient.stream.follow()
            if group.missing == 1:
                self._start_group(group)
            group.missing -= 1
        gradient.sent = True

    def release(self) -> None:
        """Starts what is held back. Must come before finish."""
        self._held.release()

    def _start_group(self, group: Group) -> None:
        for member in group.members:
            changed_gradients.watch(member)
        summing = self.compressed.request if self.compressed is not None and group.is_compressed() else self._request
        group.handle = request.submit_pack(lib.ALLREDUCE, group.pack, group.name, self._process_set, lib.PADDED,
                                           *summing, set_=self._set)
        self._handles.append(group.handle)

    def _gather(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Starts the reduction of a gradient whose form is settled as sparse."""
        grad = sparse.in_form(grad, gradient.sparse_dims, gradient.parameter, slots.gradient_dtype(gradient.parameter))
        self._gathers.append((gradient, sparse.gather_async(self._wire.cast(grad), gradient.name, self._process_set)))
        changed_gradients.watch(gradient)
        gradient.sent = True

    def _send_places(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Starts the reduction of where a gradient has entries, which itself travels as a dense one."""
        mine = sparse.places(grad, gradient.sparse_dims, gradient.parameter)
        handle = ops.allreduce_async_(mine, name=f"{gradient.name}.places", op=ops.ReduceOps.Max,
                                      process_set=self._process_set)
        self._gathers.append((gradient, lambda: ops.synchronize(handle)))

    def handles(self) -> Dict[torch.Tensor, Tuple[Any, Any]]:
        """Starts what is held back. By parameter, of all that is in flight: (handle, what decompress needs)."""
        self.release()
        waits = {} if self._sparse_as_dense else {gradient: wait for gradient, wait in self._gathers}
        found = {g.parameter: (lambda wait=wait: self._averaged(wait())) for g, wait in waits.items()}
        found.update((g.parameter, self._seen.handle_of(g)) for g in self.gradients if g.sent and g not in waits)
        return {g.parameter: (found[g.parameter], self._wire.context_of(g))
                for g in self.gradients if found.get(g.parameter)}

    def finish(self, grad_scaler: bool = False) -> None:
        """Waits for all that was sent, and makes each p.grad the reduced gradient. Raises the first error.

        RuntimeError if the program has changed one meanwhile. grad_scaler: whether it uses one, for that error.
        """
        sent = [gradient for gradient in self.gradients if gradient.sent]
        gathered = [gradient for gradient, _ in self._gathers]
        failure = self.drain()
        outside, suspects = self._undelivered(sent)
        if suspects and self._epoch == lib.epoch and lib.initialized():
            try:
                changed_gradients.expect_unchanged(suspects, grad_scaler)
            except RuntimeError as changed:  # of ranks that do the same one is the first, and ends what the others do
                raise changed from failure
        if failure is not None:
            raise failure
        late = [*outside, *suspects]
        if gathered and not self._sparse_as_dense:
            late = [gradient for gradient in late if not gradient.sparse_dims]
            self._deliver_sparse(gathered)
        self._deliver_all(late)

    @spanned("lightcc.wait", lambda self: f"{len(self._handles)} requests")
    def _wait(self) -> None:
        lib.finish_all(self._handles)

    def drain(self) -> Optional[Exception]:
        """Waits for all that was sent and forgets it; returns the first error."""
        failure: Optional[Exception] = None
        if self._handles:
            seen_failure = self._seen.take_back(self._handles)
            try:
                self._wait()
            except (HorovodInternalError, ValueError) as error:
                failure = error
            if self._epoch != lib.epoch or not lib.initialized():
                failure = failure or HorovodInternalError("lightcc was shut down while gradients were in flight.")
            failure = failure or seen_failure
        for stream in self._streams.values():
            stream.lead()
        for gradient, wait in self._gathers:
            try:
                gradient.gathered = wait()
            except (HorovodInternalError, ValueError) as error:
                failure = failure or error
        self._forget()
        return failure

    def __del__(self):
        if self._epoch != lib.epoch:
            return
        self._seen.take_back(self._handles)
        kept = [gradient.slot for gradient in self.gradients]
        for handle in self._handles:  # the core still works on the slots
            request.register(handle, kept, None)
        for gradient in self.gradients:
            if gradient.prepared:
                lib.discard(gradient.prepared)

    # Slots

    def _make_slots(self) -> None:
        if self._epoch != lib.epoch:
            failure = self.drain()
            self._epoch, self._number = lib.epoch, 0
            self._streams = {}
            self._unsettle()
            self._without_slot = list(self.gradients)
            if failure is not None:
                raise failure
        waiting = in_order_of_slots(reversed(self._without_slot))  # the order in which backward usually makes them
        forms = [(gradient, self._wire_form(gradient)) for gradient in waiting]  # before any name
        named = {id(one): one for g, _ in forms for one in (g, g.group) if one is not None}.values()
        self._number = _names.take([one.given_name for one in named], self._process_set.process_set_id, self._number)
        for one in named:
            one.name = f"{one.given_name}.{self._number}" if self._number else one.given_name
        for gradient, _ in forms:
            gradient.slot, gradient.address, gradient.dtype, gradient.form, gradient.prepared = None, 0, None, None, 0
        self._assign_slots([entry for entry in forms if not self._may_stay_without(*entry)])
        self._without_slot = []

    def _move_slots(self) -> None:
        """To another device, as the model has been."""
        if any(gradient.sent for gradient in self.gradients):
            return
        moved = [gradient for gradient in in_order_of_slots(reversed(self.gradients)) if gradient.slot is not None]
        for gradient in moved:
            self._drop_request(gradient)
        self._assign_slots([(gradient, self._wire_form(gradient)) for gradient in moved])

    def _assign_slots(self, forms: Sequence[Tuple[Gradient, torch.Tensor]]) -> None:
        self._device = self._one_device()
        by_dtype: Dict[torch.dtype, List[Tuple[Gradient, torch.Tensor]]] = {}
        for gradient, form in forms:
            by_dtype.setdefault(form.dtype, []).append((gradient, form))
        for entries in by_dtype.values():
            self._make_slab(entries)
        for group in {id(g.group): g.group for g, _ in forms if g.group is not None}.values():
            group.close()

    def _one_device(self) -> Optional[torch.device]:
        """That of the parameters. Backward has a thread for each device, and this object is used by one at a time."""
        devices = {slots.device_of(gradient.parameter): gradient.given_name for gradient in self.gradients}
        if len(devices) > 1:
            raise MixedDevicesError("The parameters of one optimizer must be on one device; here are " + ", ".join(
                f"{name} on {device}" for device, name in devices.items()) + ". Keep those of other devices with an "
                "optimizer of their own.")
        return next(iter(devices), None)

    def _may_stay_without(self, gradient: Gradient, form: torch.Tensor) -> bool:
        """Whether to wait for the first dense gradient: a sparse one of a large embedding needs no memory for all."""
        large = form.numel() * form.element_size() >= _ALONE_BYTES
        return large and gradient.group is None and not self._sparse_as_dense

    def _wire_form(self, gradient: Gradient) -> torch.Tensor:
        return self._wire.form(gradient, self._dtype_of(gradient.parameter))

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """That of what is reduced."""
        return slots.gradient_dtype(parameter)

    def _make_slab(self, entries: Sequence[Tuple[Gradient, torch.Tensor]]) -> None:
        made = slots.in_one_slab([form for _, form in entries], self._device)
        stream = self._streams.get(self._device) or slot_stream.stream_of(made[0].tensor)
        if stream is not None:
            self._streams[self._device] = stream
        for (gradient, _), slot in zip(entries, made):
            gradient.slot, gradient.address, gradient.bytes = slot
            gradient.stream = stream
            gradient.dtype = gradient.slot.dtype if self._wire.casts and not gradient.sparse_dims else None
            gradient.form = slots.form_of(gradient.parameter)
            gradient.copied_late, gradient.layout = is_copied_late(gradient), None
            if gradient.group is None:
                gradient.prepared = self._prepare(gradient)

    def _prepare(self, gradient: Gradient) -> int:
        summing = self.compressed.request if gradient.compressed else self._request
        address, dtype, shape, place = described(gradient)
        return request.prepare(lib.ALLREDUCE, address, dtype, shape, gradient.name, self._process_set, *summing,
                               set_=self._set, place=place, flags=lib.PADDED)

    def _forget(self) -> None:
        del self._handles[:]
        self._held.clear()
        del self._gathers[:]
        for gradient in self.gradients:
            gradient.sent = False
            if gradient.group is not None:
                gradient.group.missing, gradient.group.handle = len(gradient.group.members), 0

    # The form

    def _make_sparse(self, gradient: Gradient, dimensions: int) -> None:
        gradient.sparse_dims, gradient.dtype = dimensions, None
        group = gradient.group
        if self._sparse_as_dense:
            if gradient.sent:
                self._send_places(gradient, gradient.parameter.grad)
        elif group is not None:
            group.leave(gradient)
            if group.members and group.missing == 0:  # it was the one that the group waited for
                self._start_group(group)

    def _unsettle(self) -> None:
        """Makes every form open again. Nothing is on its way."""
        for gradient in self.gradients:
            if gradient.sparse_dims:
                gradient.sparse_dims, gradient.gathered = 0, None
                gradient.dtype = gradient.slot.dtype if self._wire.casts and gradient.slot is not None else None
                if gradient.home is not gradient.group:
                    gradient.home.take_back(gradient)
        self._unsettled = list(self.gradients)
        self._joins = lib.joins

    # Between p.grad and slot

    def _fit(self, gradient: Gradient) -> None:
        """A slot if there is none that fits: model.double() or model.cuda() has changed the parameter."""
        if gradient.form != slots.form_of(gradient.parameter):
            self._drop_request(gradient)
            self._assign_slots([(gradient, self._wire_form(gradient))])

    def _drop_request(self, gradient: Gradient) -> None:
        """Must come before it gets another slot."""
        if gradient.prepared:
            lib.discard(gradient.prepared)
            gradient.prepared = 0
        if self.compressed is not None:
            self.compressed.fit(gradient)

    def _fill(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Makes the slot what this rank sends, whatever form its gradient has."""
        self._fit(gradient)
        self._wire.fill(gradient, grad)

    def _undelivered(self, sent: Sequence[Gradient]) -> Tuple[Sequence[Gradient], Sequence[Gradient]]:
        return changed_gradients.undelivered(sent)

    def _deliver_all(self, late: Sequence[Gradient]) -> None:
        for gradient in late:
            if gradient.parameter.requires_grad:
                self._wire.deliver(gradient, gradient.parameter.grad)

    def _deliver_sparse(self, gathered: Sequence[Gradient]) -> None:
        for gradient in gathered:
            result, gradient.gathered = gradient.gathered, None
            parameter = gradient.parameter
            if parameter.requires_grad:
                result = sparse.with_values(result, result._values().to(slots.gradient_dtype(parameter)))
                parameter.grad = self._averaged(result)

    def _averaged(self, total: torch.Tensor) -> torch.Tensor:
        """What op makes of a sum of sparse gradients."""
        count = self._process_set.size() if self._request[0] == ops.Average else 1
        return sparse.divided(total, count) if count > 1 else total
