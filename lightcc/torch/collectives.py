"""The collectives of a torch process group, each as one request of lightcc.

Reductions and broadcasts run in place on contiguous tensors of a dtype that lightcc knows. Else, and for what has other
inputs than outputs, lightcc's result is copied to where torch wants it, by whoever waits for the work. Sparse tensors
are gathered and added up. Tensors are on the CPU or a CUDA GPU, those of a call on one device.
"""
import ctypes
import math
from datetime import timedelta
from typing import Any, Callable, List, Optional, Sequence

import torch
import torch.distributed as dist

from lightcc.core import lib, request
from lightcc.core.adapter import MixedDevicesError, adapter_of
from lightcc.core.process_sets import ProcessSet
from lightcc.torch import slots
from lightcc.torch.futures import Operation
from lightcc.torch.spans import spanned
from lightcc.torch.sparse_sum import entries, summed
from lightcc.torch.work import Work

_OPS = {dist.ReduceOp(getattr(dist.ReduceOp, name)): code for name, code in (
    ("SUM", lib.SUM), ("AVG", lib.AVERAGE), ("MIN", lib.MIN), ("MAX", lib.MAX), ("PRODUCT", lib.PRODUCT))}
_DTYPES = {getattr(torch, name) for name in lib.DTYPES if hasattr(torch, name)}
_TAGS, _TAGGED_GROUPS = 1 << 24, 1 << 7  # the core's tags have 32 bits: groups on one process set share them

Tensors = List[torch.Tensor]


class Collectives(dist.ProcessGroup):
    """What the members of a process set do together. Roots and lists are by rank in the group, in every method."""

    def __init__(self, rank: int, size: int, process_set: ProcessSet, timeout: timedelta, prefix: str, number: int = 0):
        """prefix: of the names by which ranks match requests; empty if no other group works on the process set. number:
        of the group among those on the process set."""
        super().__init__(rank, size)
        self._rank, self._size, self._set = rank, size, process_set
        self._timeout, self._prefix, self._number, self._calls = timeout, prefix, number, 0

    # In place

    def allreduce(self, tensors: Tensors, opts=None) -> Work:
        op = _op(opts, "allreduce")
        if tensors and tensors[0].layout is not torch.strided:
            return self._sparse(tensors, opts, op)
        return self._in_place(lib.ALLREDUCE, tensors, opts, op=op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts) -> Work:
        op, mine = _op(opts, "reduce"), opts.rootRank == self._rank
        return self._in_place(lib.ALLREDUCE, tensors if mine else [_joined([t]).view(t.shape) for t in tensors], opts,
                              op=op)

    def broadcast(self, tensors: Tensors, opts) -> Work:
        return self._in_place(lib.BROADCAST, tensors, opts, root=self._set.ranks[opts.rootRank])

    # All ranks to all

    def allgather(self, outputs: List[Tensors], inputs: Tensors, opts=None) -> Work:
        return self._gathered(inputs, outputs, opts)

    def allgather_coalesced(self, outputs: List[Tensors], inputs: Tensors, opts=None) -> Work:
        return self._gathered(inputs, [list(of_one) for of_one in zip(*outputs)], opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts=None) -> Work:
        return self._gathered([tensor], [[output]], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> Work:
        return self._gathered(inputs, [[output] for output in outputs], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: List[Tensors], opts=None) -> Work:
        if any(t.numel() != output.numel() for output, parts in zip(outputs, inputs) for t in parts):
            raise ValueError("reduce_scatter over lightcc: each tensor of the input list must be as large as the "
                             "output.")
        whole = [_joined(parts) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, whole, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts=None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts=None) -> Work:
        for output, tensor in zip(outputs, inputs):
            _expect_count("reduce_scatter", "input", tensor.numel(), self._size * output.numel())
        return self._into([[t] for t in outputs], opts, lib.REDUCESCATTER, [_flat(t) for t in inputs],
                          _op(opts, "reduce_scatter"))

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int],
                          input_splits: Sequence[int], opts=None) -> Work:
        sent = self._split("input", tensor, input_splits)
        received = self._split("output", output, output_splits)
        return self._all_to_all([output], received, _flat(tensor), sent, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts=None) -> Work:
        return self._all_to_all(outputs, _counts(outputs), _joined(inputs), _counts(inputs), opts)

    # One rank to all, all to one

    def gather(self, outputs: List[Tensors], inputs: Tensors, opts) -> Work:
        sent = _flat(inputs[0])
        mine = outputs[0] if opts.rootRank == self._rank else []
        return self._all_to_all(mine, _counts(mine) or [0] * self._size, sent, self._only(opts.rootRank, sent.numel()),
                                opts)

    def scatter(self, outputs: Tensors, inputs: List[Tensors], opts) -> Work:
        mine = inputs[0] if opts.rootRank == self._rank else []
        sent = _joined(mine) if mine else _flat(outputs[0])[:0]
        return self._all_to_all(outputs[:1], self._only(opts.rootRank, outputs[0].numel()), sent,
                                _counts(mine) or [0] * self._size, opts)

    def barrier(self, opts=None) -> Work:
        handle = request.submit_barrier(self._set, _flags(opts), self._name())
        return Work(Operation(handle), [], self._timeout_of(opts))

    # One rank to another

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> Work:
        tensor = _single("send", tensors)
        sent = _dense(tensor, False)
        return self._to_peer(lib.SEND, sent.cpu() if sent.is_cuda else sent, destination, tag, None, tensor)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        tensor = _single("recv", tensors)
        written = _dense(tensor, False)
        if written.is_cuda:
            written = torch.empty_like(written, device="cpu")

        def copy_back(_: int) -> None:
            tensor.detach().copy_(_like(written, tensor))
        return self._to_peer(lib.RECV, written, source, tag,
                             None if written.data_ptr() == tensor.data_ptr() else copy_back, tensor)

    @spanned("lightcc.send")
    def _to_peer(self, kind: int, dense: torch.Tensor, peer: int, tag: int, finish: Optional[Callable[[int], Any]],
                 tensor: torch.Tensor) -> Work:
        if not 0 <= tag < _TAGS:
            raise ValueError(f"send and recv over lightcc: the tag must be from 0 to {_TAGS - 1}, not {tag}.")
        if self._number >= _TAGGED_GROUPS:
            raise ValueError(f"send and recv over lightcc: this is group {self._number + 1} of these ranks, and only "
                             f"the first {_TAGGED_GROUPS} have them.")
        handle = request.submit_to_peer(kind, adapter_of(dense), dense, peer, self._number * _TAGS + tag, self._set)
        return self._work(handle, [dense], finish, [tensor], None)

    # What the core has not

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        raise NotImplementedError("recv of any source: over lightcc a receive names the rank that it is from: "
                                  "torch.distributed.recv(tensor, src).")

    def _start_coalescing(self, device: torch.device) -> None:
        dist.distributed_c10d._world.pg_coalesce_state.pop(self, None)  # else torch goes on collecting calls for ever
        raise NotImplementedError(f"_coalescing_manager(device={str(device)!r}): over lightcc leave out the device; "
                                  "then all_reduce, all_gather_into_tensor and reduce_scatter_tensor go together.")

    # The names that some of them have in other versions of torch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # How they are done

    @spanned("lightcc.send")
    def _in_place(self, kind: int, tensors: Tensors, opts, op: int = 0, root: int = 0) -> Work:
        self._expect_one_device(tensors)
        if kind == lib.ALLREDUCE and op not in (lib.SUM, lib.AVERAGE) and any(t.is_complex() for t in tensors):
            raise ValueError("Complex numbers can be added up and averaged; they have no other reduction here.")
        sent = [_dense(t, kind == lib.ALLREDUCE) for t in tensors]
        if len(sent) == 1:
            handle = request.submit(kind, adapter_of(sent[0]), sent[0], sent[0], self._name(), self._set, _flags(opts),
                                    op, root=root)
        elif kind == lib.BROADCAST:
            raise ValueError(f"broadcast over lightcc takes one tensor, not {len(sent)}.")
        else:
            handle = request.submit_list(kind, sent, sent, self._name(), self._set, _flags(opts), op)

        copies = [(t, dense) for t, dense in zip(tensors, sent) if dense.data_ptr() != t.data_ptr()]

        def copy_back(_: int) -> None:
            for tensor, dense in copies:
                tensor.detach().copy_(_like(dense, tensor))
        return self._work(handle, sent, copy_back if copies else None, tensors, opts)

    def _sparse(self, tensors: Tensors, opts, op: int) -> Work:
        self._expect_one_device(tensors)
        parts = [entries(tensor, op, "allreduce over lightcc") for tensor in tensors]
        sent, count = _all(parts), len(parts[0])
        handle = request.submit_list(lib.ALLGATHER, sent, None, self._name(), self._set, _flags(opts))

        def finish(handle: int) -> None:
            came = [adapter_of(part).output(handle, i, part) for i, part in enumerate(sent)]
            for i, tensor in enumerate(tensors):
                with torch.no_grad():  # not detach(): what that returns has indices and values of its own
                    tensor.copy_(summed(came[count * i:count * (i + 1)], tensor, op, self._size))
        return self._work(handle, sent, finish, tensors, opts)

    def _into(self, outputs: List[Tensors], opts, kind: int, sent: Tensors, op: int = 0) -> Work:
        """outputs: for each tensor that is sent those that share its result, one after the other."""
        self._expect_one_device([*sent, *_all(outputs)])
        handle = request.submit_list(kind, sent, None, self._name(), self._set, _flags(opts), op)
        return self._work(handle, sent, lambda handle: [_deal(handle, i, t, to) for i, (t, to)
                                                        in enumerate(zip(sent, outputs))], _all(outputs), opts)

    def _gathered(self, inputs: Tensors, outputs: List[Tensors], opts) -> Work:
        return self._into(outputs, opts, lib.ALLGATHER, [_flat(_dense(t, False)) for t in inputs])

    def _all_to_all(self, outputs: Tensors, received: Sequence[int], tensor: torch.Tensor, sent: Sequence[int],
                    opts) -> Work:
        """An all-to-all of `sent` elements of a flat tensor to each rank; `received` are expected."""
        if len(sent) != self._size or len(received) != self._size:
            raise ValueError(f"A group of {self._size} ranks needs as many tensors or splits, not {len(sent)} to send "
                             f"and {len(received)} to receive.")
        self._expect_one_device([tensor, *outputs])
        flat = _flat(_dense(tensor, False))
        width = flat.numel() // tensor.numel() if tensor.numel() else 1
        splits = (ctypes.c_int32 * self._size)(*[width * count for count in sent])
        handle = request.submit(lib.ALLTOALL, adapter_of(flat), flat, None, self._name(), self._set, _flags(opts),
                                splits=splits)

        def finish(handle: int) -> None:
            came = [count // width for count in lib.received_splits(handle, 0, self._set.process_set_id)]
            if came != list(received):
                raise ValueError(f"Rank {self._rank} of the group was sent {came} elements by the ranks and expects "
                                 f"{list(received)}.")
            _deal(handle, 0, flat, outputs)
        return self._work(handle, [flat], finish, outputs, opts)

    def _work(self, handle: int, sent: Tensors, finish: Optional[Callable[[int], Any]], outputs: Tensors,
              opts) -> Work:
        if not handle and finish is not None:
            finish(0)
        operation = Operation(handle, sent, finish, tensors=[*sent, *outputs])
        return Work(operation, list(outputs), self._timeout_of(opts))

    def _expect_one_device(self, tensors: Tensors) -> None:
        for i, tensor in enumerate(tensors[1:], 1):
            first, other = slots.device_of(tensors[0]), slots.device_of(tensor)
            if other != first:
                raise MixedDevicesError(f"torch.distributed over lightcc, group rank {self._rank}: tensor {i} of "
                                        f"the call is on {other}, and tensor 0 on {first}. All tensors of a call, "
                                        "those that are sent and those that are written, must be on one device.")

    def _name(self) -> Optional[str]:
        if not self._prefix:
            return None  # numbered by the core
        self._calls += 1
        return f"{self._prefix}.{self._calls}"

    def _timeout_of(self, opts) -> timedelta:
        timeout = getattr(opts, "timeout", None)
        return timeout if timeout is not None and timeout > timedelta(0) else self._timeout

    def _only(self, rank: int, count: int) -> List[int]:
        return [count if i == rank else 0 for i in range(self._size)]

    def _split(self, what: str, tensor: torch.Tensor, splits: Sequence[int]) -> List[int]:
        """How many elements are each rank's."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            _expect_count("all_to_all_single", f"{what}'s rows", rows, rows // self._size * self._size)
            splits = [rows // self._size] * self._size
        _expect_count("all_to_all_single", f"{what}'s rows", rows, sum(splits))
        return [count * (tensor.numel() // rows if rows else 0) for count in splits]


def _op(opts, verb: str) -> int:
    if opts is None:
        return lib.SUM
    op = _OPS.get(opts.reduceOp)
    if op is None:
        name = next((name for name in ("BAND", "BOR", "BXOR") if opts.reduceOp == getattr(dist.ReduceOp, name)),
                    "this operation")
        raise ValueError(f"{verb} over lightcc can be SUM, AVG, MIN, MAX or PRODUCT, not {name}.")
    return op


def _flags(opts) -> int:
    return lib.UNORDERED if opts is None or getattr(opts, "asyncOp", True) else lib.BLOCK


def _dense(tensor: torch.Tensor, arithmetic: bool) -> torch.Tensor:
    """The tensor in a form that lightcc can send, in the same memory if it is contiguous."""
    tensor = _strided(tensor).resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _DTYPES:
        return tensor
    if arithmetic:
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor  # refused, with the reason, when sent
    return tensor.reshape(-1).view(torch.uint8)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise ValueError(f"The tensor has layout {tensor.layout}; torch.distributed over lightcc takes sparse tensors "
                         "in all_reduce only. Send tensor.to_dense().")
    return tensor.detach()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return _strided(tensor).reshape(-1)


def _joined(tensors: Tensors) -> torch.Tensor:
    """A new flat tensor of all their elements."""
    return torch.cat([_flat(t) for t in tensors])


def _like(dense: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """_dense undone: the dtype and shape of the tensor."""
    return (dense if dense.dtype == tensor.dtype else dense.reshape(-1).view(tensor.dtype)).view(tensor.shape)


def _deal(handle: int, index: int, sent: torch.Tensor, outputs: Tensors) -> None:
    """Copies result `index`, of what was sent, to tensors, one after the other."""
    place = request.place_of(handle)
    if place is not None and len(outputs) == 1 and outputs[0].is_contiguous():  # the GPU copies it there itself
        _expect_count("A collective", "result", math.prod(lib.output_shape(handle, index)),
                      outputs[0].numel() * outputs[0].element_size() // sent.element_size())
        lib.output_to(handle, index, place.now(), outputs[0].data_ptr())
        return
    result = adapter_of(sent).output(handle, index, sent)
    for part, output in zip(_cut(result, outputs), outputs):
        output.detach().copy_(_like(part, output))


def _cut(result: torch.Tensor, outputs: Tensors) -> Sequence[torch.Tensor]:
    counts = [t.numel() * t.element_size() // result.element_size() for t in outputs]
    _expect_count("A collective", "result", result.numel(), sum(counts))
    return result.split(counts)


def _counts(tensors: Tensors) -> List[int]:
    return [t.numel() for t in tensors]


def _all(lists: List[Tensors]) -> Tensors:
    return [t for tensors in lists for t in tensors]


def _expect_count(verb: str, what: str, count: int, expected: int) -> None:
    if count != expected:
        raise ValueError(f"{verb}: the {what} should be {expected} elements for these tensors, ranks and splits, and "
                         f"has {count}.")


def _single(verb: str, tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise ValueError(f"{verb} over lightcc takes one tensor, not {len(tensors)}.")
    return tensors[0]
