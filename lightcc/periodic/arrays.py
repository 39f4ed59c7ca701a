"""What a rank exchanges of variables after some of its own steps: when, how, and what becomes of it.

All that is known of the variables is how to read and write their values. What the ranks share, outer values and
momentum, lies here. In each epoch of an elastic job it begins anew, from the variables of the first rank of the process
set: those of this epoch's ranks may be of an earlier commit.
Sources: lightcc.core.exchange_schedule, lightcc.torch.local_sgd and lightcc.torch.diloco.
"""
import copy
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from lightcc.compress import codec
from lightcc.compress.choice import text_of
from lightcc.compress.compressors import CoreCompressor, NoneCompressor
from lightcc.core import averaging, lib, ops, request
from lightcc.core.agreed_settings import expect_equal, number
from lightcc.core.exchange_schedule import ExchangeSchedule, checked, in_fragments
from lightcc.core.process_sets import ProcessSet, global_process_set, ranks_of

Read = Callable[[Sequence[int]], List[np.ndarray]]  # copies, which are the reader's to overwrite
Write = Callable[[Sequence[int], Sequence[np.ndarray]], None]


_NO_ERA = (0, 0)


class OuterSGD(NamedTuple):
    """The step of an outer optimizer: SGD as torch has it.

    >>> outer, momentum = np.ones(1), np.zeros(1)
    >>> OuterSGD(0.5, 0.5, True).step(outer, momentum, np.ones(1)); outer, momentum
    (array([0.25]), array([1.]))
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, outer: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> None:
        """In place."""
        momentum *= momentum.dtype.type(self.momentum)
        momentum += gradient
        direction = gradient + momentum.dtype.type(self.momentum) * momentum if self.nesterov else momentum
        outer -= outer.dtype.type(self.learning_rate) * direction


class ArrayExchange:
    """The exchange of a list of variables. Its methods are called between the steps, by one thread."""

    def __init__(self, what: str, schedule: ExchangeSchedule, outer: Optional[OuterSGD], alpha: float,
                 compression: Any, process_set: ProcessSet):
        """what: begins errors and the names of collectives. outer: None: the values are averaged."""
        self.what, self._schedule, self._outer, self._alpha = what, schedule, outer, alpha
        self._compression, self._process_set = compression, process_set
        self._read: Optional[Read] = None
        self._write: Write = lambda indices, values: None
        self._labels: List[str] = []
        self._parts: List[List[int]] = []            # indices of the variables of each fragment
        self._outers: List[np.ndarray] = []
        self._momenta: List[np.ndarray] = []
        self._handles: Dict[int, List[int]] = {}     # of fragments on their way
        self._sent: Dict[int, List[np.ndarray]] = {}  # buffers of those
        self._own: Dict[int, List[np.ndarray]] = {}  # with a delay and without outer: what this rank has sent
        self._era = _NO_ERA                          # epoch and joins in which all ranks have begun alike
        self.steps = 0

    @property
    def started(self) -> bool:
        return self._read is not None

    def start(self, read: Read, write: Write, labels: Sequence[str]) -> None:
        """Takes the values as they are as those from which all ranks begin. labels: a name of each variable. ValueError
        if there are fewer than fragments."""
        if len(labels) < self._schedule.fragments:
            raise ValueError(f"{self.what}: {len(labels)} variables cannot be cut into {self._schedule.fragments} "
                             "fragments.")
        self._read, self._write, self._labels = read, write, list(labels)
        values = read(range(len(labels)))
        self._parts = in_fragments([value.nbytes for value in values], self._schedule.fragments)
        self._begin_from(values)

    def forget(self) -> None:
        """Waits for what is on its way, and forgets the variables and all that it has of them: start() comes again. All
        ranks do so between the same steps."""
        if self.is_of_this_epoch():
            for handle in [handle for handles in self._handles.values() for handle in handles]:
                ops.synchronize(handle)
        self._drop()
        self._read, self.steps, self._era = None, 0, _NO_ERA
        self._outers, self._momenta = [], []
        self._compression = copy.copy(self._compression)  # without what was left behind

    def is_of_this_epoch(self) -> bool:
        """Whether it has made steps with the ranks that there are now."""
        return self._era[0] == lib.epoch and lib.initialized()

    def before_step(self) -> None:
        """Once before the first step of an epoch, or with it."""
        if not self._process_set.included():
            return
        averaging.refuse_join(self)
        era = lib.epoch, lib.joins
        if self._era == era:
            return
        self._drop()  # of another epoch, in which they have ended
        if self._era != _NO_ERA and not self.is_of_this_epoch():
            assert self._read is not None  # start comes first
            self._begin_from(self._read(range(len(self._labels))))
        expect_equal(self.what, {**self._schedule._asdict(), "alpha": self._alpha, "outer": self._outer,
                                 "compression": text_of(self._compression), "variables": len(self._labels)},
                     self._process_set)
        root = ranks_of(self._process_set)[0]
        steps = np.array([self.steps])
        shared = [steps, *self._outers, *self._momenta]
        for handle in [ops.broadcast_async_(value, root, f"{self.what}.{i}", self._process_set)
                       for i, value in enumerate(shared)]:
            ops.synchronize(handle)
        self.steps, self._era = int(steps[0]), era

    def after_step(self) -> None:
        """Counts a step, and does what is due after it."""
        self.steps += 1
        if not self._process_set.included():
            return
        ending, beginning = self._schedule.at(self.steps)
        for fragment in ending:
            self._end(fragment, False)
        for fragment in beginning:
            self._begin(fragment)
            if not self._schedule.delay:
                self._end(fragment, False)

    def now(self) -> None:
        """Averages everything; afterwards all ranks have the same values."""
        if not self._process_set.included():
            return
        self.before_step()
        for fragment in sorted(self._handles):
            self._end(fragment, False)
        for fragment in range(len(self._parts)):
            self._begin(fragment)
            self._end(fragment, True)

    def end(self) -> None:
        """Exchanges everything; all ranks do so, and may join until they make further steps."""
        self.now()
        averaging.allow_join(self)

    def _drop(self) -> None:
        for of_fragments in (self._handles, self._sent, self._own):
            of_fragments.clear()

    def _begin_from(self, values: List[np.ndarray]) -> None:
        if self._outer is not None:
            self._outers, self._momenta = values, [np.zeros_like(value) for value in values]

    def _begin(self, fragment: int) -> None:
        assert self._read is not None  # start comes first
        indices = self._parts[fragment]
        values = self._read(indices)
        if self._outer is None:
            if self._schedule.delay:
                self._own[fragment] = [value.copy() for value in values]
        else:
            values = [np.subtract(self._outers[index], value, out=value) for index, value in zip(indices, values)]
        self._sent[fragment] = values
        compressed = [self._is_compressed(index, value) for index, value in zip(indices, values)]
        self._handles[fragment] = []
        for kind in (True, False):
            some = [value for value, is_compressed in zip(values, compressed) if is_compressed == kind]
            if some:
                self._handles[fragment].append(self._submit(some, f"{self.what}.{fragment}" + ".compressed" * kind,
                                                            kind))

    def _submit(self, values: List[np.ndarray], name: str, compressed: bool) -> int:
        if not compressed:
            return ops.grouped_allreduce_async_(values, name=name, op=ops.Average, process_set=self._process_set)
        reduction = codec.reduction_of(values, self._compression, name, ops.Average, 1.0, 1.0)
        handle = request.submit_list(lib.ALLREDUCE, values, values, name, self._process_set, 0, **reduction)
        return request.register(handle, values, values)

    def _is_compressed(self, index: int, value: np.ndarray) -> bool:
        return isinstance(self._compression, CoreCompressor) and self._compression.is_compressed(
            self._labels[index], value.shape, value.dtype.name)

    def _end(self, fragment: int, wholly: bool) -> None:
        if fragment not in self._handles:
            return  # another epoch has begun since
        for handle in self._handles.pop(fragment):
            ops.synchronize(handle)
        indices, arrived, own = self._parts[fragment], self._sent.pop(fragment), self._own.pop(fragment, None)
        assert self._read is not None
        if self._outer is None:
            if own is not None and not wholly:
                arrived = [now + mean - sent for now, mean, sent in zip(self._read(indices), arrived, own)]
            self._write(indices, arrived)
            return
        if wholly:  # the average of the ranks' values; it is not this fragment's turn, so the outer ones stay
            self._write(indices, [self._outers[index] - gradient for index, gradient in zip(indices, arrived)])
            return
        for index, gradient in zip(indices, arrived):
            self._outer.step(self._outers[index], self._momenta[index], gradient)
        outers = [self._outers[index] for index in indices]
        if self._alpha:
            outers = [now.dtype.type(self._alpha) * now + now.dtype.type(1 - self._alpha) * outer
                      for now, outer in zip(self._read(indices), outers)]
        self._write(indices, outers)


def local_sgd(what: str, sync_every: int, delay: int = 0,
              process_set: ProcessSet = global_process_set) -> ArrayExchange:
    """That of LocalSGD. ValueError, which begins with `what`, for arguments out of their ranges.

    >>> local_sgd("hvd.LocalSGD", 4).steps
    0
    """
    return ArrayExchange(what, checked(what, sync_every, 1, delay), None, 0.0, NoneCompressor, process_set)


def diloco(what: str, sync_every: int, fragments: int, delay: int, alpha: Optional[float], outer_learning_rate: float,
           outer_momentum: float, nesterov: bool, compression: Any, process_set: ProcessSet) -> ArrayExchange:
    """That of DiLoCo. ValueError, which begins with `what`, for arguments out of their ranges.

    >>> diloco("hvd.DiLoCo", 4, 2, 1, None, 0.7, 0.9, True, NoneCompressor, hvd.global_process_set).steps
    0
    """
    if compression is not NoneCompressor and not isinstance(compression, CoreCompressor):
        raise ValueError(f"{what}: compression can be topk, int8, int4 or none, not {text_of(compression)}.")
    schedule = checked(what, sync_every, fragments, delay)
    outer = OuterSGD(number(what, "outer_learning_rate", outer_learning_rate),
                     number(what, "outer_momentum", outer_momentum, 0.0, 1.0), bool(nesterov))
    share = number(what, "alpha", (0.5 if delay else 0.0) if alpha is None else alpha, 0.0, 1.0)
    return ArrayExchange(what, schedule, outer, share, compression, process_set)
