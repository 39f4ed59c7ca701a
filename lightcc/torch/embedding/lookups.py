"""Looking up several modules' ids in one exchange, now or in advance (prefetch)."""
from itertools import zip_longest
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

import numpy
import torch

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding import exchange
from lightcc.embedding.table import Table
from lightcc.torch.embedding.parameter import Pending, TableParameter


class Wanted(NamedTuple):
    """What a module looks up for its inputs."""

    parameter: TableParameter
    keys: exchange.Keys
    training: bool  # rows are to be trained
    output: Callable[[Pending, torch.Tensor], torch.Tensor]  # of the rows, and of which row is each key's


Request = Tuple[Any, ...]  # a module and its inputs


def lookup(requests: Sequence[Request]) -> List[torch.Tensor]:
    """Looks up several modules' inputs in one exchange, which all ranks take part in, and returns their outputs.

    requests: (module, *inputs), the inputs being those of the module's forward. The same modules in the same order on
    all ranks of the tables' process set; inputs may have any number of ids, also none. Modules may share a table, and
    one module may come twice. Rows that were prefetched are taken from there.
    Errors: ValueError for a wrong id (lightcc.torch.embedding.keys) or offsets; HorovodInternalError, on every rank, if
    the ranks ask for other tables, or a table is of another dim, dtype, optimizer or initializer on another rank.

    >>> from lightcc.torch import embedding as E
    >>> user, item = E.HashEmbedding(4, name="user"), E.HashEmbedding(8, name="item")
    >>> users, items = E.lookup([(user, torch.tensor([1, 2])), (item, torch.tensor([[5], [6]]))])
    >>> users.shape, items.shape
    (torch.Size([2, 4]), torch.Size([2, 1, 8]))
    """
    for batch in _prefetched:
        if batch.is_for(requests):
            return batch.take(requests)
    return Batch(requests).take(requests)


def prefetch(requests: Sequence[Request], process_set: ProcessSet = global_process_set) -> "Batch":
    """Starts the lookup of the next batch: finds its unique keys and sends them to their owners, and returns at once.

    The rows are read after the next step() of the tables' optimizers, when the modules are called with these inputs, or
    by lookup(requests): so results are the same, bit for bit, as without prefetch. Call it between the loss and
    backward(), to have the exchange run during backward. All ranks call it, in the same order among their lookups.
    requests: as for lookup; inputs must not change until they are looked up. What is prefetched must be looked up, as
    the next that these modules look up in training, or dropped on all ranks by drop() of what is returned. A rank whose
    data end with this step gives [] while others go on, and calls serve() after the step; process_set is the tables',
    and is of use only there. Where a rank serves, each prefetched lookup takes one more small message.
    Errors: those of lookup; there, ValueError for other ids than were prefetched.

    >>> from lightcc.torch import embedding as E
    >>> user, ids = E.HashEmbedding(4, name="user"), torch.tensor([1, 2])
    >>> batch = E.prefetch([(user, ids)]); user(ids).shape
    torch.Size([2, 4])
    """
    batch = Batch(requests, ahead=True)
    if requests:
        _prefetched.append(batch)
    else:
        _served.append((process_set, exchange.Served(process_set, prefetch=True)))
    return batch


class Batch:
    """A lookup on its way: the requests, and from take() on the outputs."""

    def __init__(self, requests: Sequence[Request], ahead: bool = False):
        self.requests = [tuple(request) for request in requests]
        self._wanted: List[Wanted] = [request[0].wanted(*request[1:]) for request in self.requests]
        of_table: Dict[int, List[int]] = {}  # the requests of each table
        for i, one in enumerate(self._wanted):
            of_table.setdefault(id(one.parameter), []).append(i)
        of_call: Dict[Tuple[int, bool], List[List[int]]] = {}  # tables of a process set, and to be trained or not
        for indices in of_table.values():
            table = self._wanted[indices[0]].parameter.table
            training = table.rule is not None and any(self._wanted[i].training for i in indices)
            of_call.setdefault((id(table.group), training), []).append(indices)
        self._calls = [(exchange.Lookup([self._keys(indices) for indices in several], training, ahead), several)
                       for (_, training), several in of_call.items()]
        self._outputs: List[Any] = []

    def _keys(self, indices: List[int]) -> Tuple[Table, exchange.Keys]:
        """The keys of all requests of one table."""
        table, parts = self._wanted[indices[0]].parameter.table, [self._wanted[i].keys for i in indices]
        keys = parts[0].keys if len(parts) == 1 else numpy.concatenate([part.keys for part in parts])
        return table, exchange.Keys(keys, numpy.concatenate([p.checks for p in parts]) if table.strings else None)

    def is_for(self, requests: Sequence[Request]) -> bool:
        """Whether it is what these modules look up next: by the modules alone, so that all ranks find the same."""
        own = [(request[0], wanted.training) for request, wanted in zip(self.requests, self._wanted) if request]
        return all(any(module is request[0] and training == module.is_trained() for module, training in own)
                   for request in requests)

    def take(self, requests: Sequence[Request]) -> List[torch.Tensor]:
        """The outputs of some of its requests, each once. ValueError for a request that is not in it."""
        indices = []
        for request in requests:
            index = next((i for i, own in enumerate(self.requests) if own and _same(own, request)), None)
            if index is None:
                raise ValueError(f"table {request[0].name!r}: other ids were prefetched than are looked up now. Look "
                                 "up what was prefetched, or drop() what prefetch() has returned, on all ranks.")
            indices.append(index)
        if not self._outputs:
            self._finish()
        for index in indices:
            self.requests[index] = ()
        if not any(self.requests):
            self.drop()
        return [self._outputs[index] for index in indices]

    def drop(self) -> None:
        """Forgets a prefetched batch that will not be looked up; on all ranks, which wait for each other."""
        if self in _prefetched:
            _prefetched.remove(self)
            if not self._outputs:
                for call, _ in self._calls:
                    call.drop()

    def _finish(self) -> None:
        self._outputs = [None] * len(self._wanted)
        for call, several in self._calls:
            for indices, found in zip(several, call.finish()):
                pending, inverse = Pending(found, self._wanted[indices[0]].parameter), torch.from_numpy(found.inverse)
                for i, part in zip(indices, inverse.split([len(self._wanted[i].keys.keys) for i in indices])):
                    self._outputs[i] = self._wanted[i].output(pending, part)


_prefetched: List[Batch] = []
_served: List[Tuple[ProcessSet, exchange.Served]] = []  # for serve(), of ranks whose data end


def forget() -> None:
    """The world in which batches were prefetched is gone."""
    _prefetched.clear()
    _served.clear()


def served(process_set: ProcessSet) -> List[exchange.Served]:
    """Calls in which this rank takes part already, as it has no next batch; they are to be finished in this order."""
    calls = [call for of, call in _served if of is process_set]
    _served[:] = [(of, call) for of, call in _served if of is not process_set]
    return calls


def under_way() -> bool:
    """Whether a batch was prefetched that is not looked up yet."""
    return bool(_prefetched)


def _same(own: Request, other: Request) -> bool:
    return own[0] is other[0] and all(_same_input(*inputs) for inputs in zip_longest(own[1:], other[1:]))


def _same_input(own: Any, other: Any) -> bool:
    if own is other:
        return True
    if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
        return own.shape == other.shape and own.dtype == other.dtype and torch.equal(own, other)
    return own is not None and other is not None and numpy.array_equal(own, other)
