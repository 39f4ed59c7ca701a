"""A table, of which each rank of a process set has a shard: its name, kind, optimizer, and what is asked of one shard.

Lookups and updates, which all ranks make together, are in exchange.py; rows as arrays in rows.py.
"""
import gc
import weakref
from typing import Any, Dict, Optional, Tuple, Union

import numpy

from lightcc.core import lib as core
from lightcc.core import request
from lightcc.core.process_sets import ProcessSet, global_process_set, not_registered
from lightcc.embedding import kernels, lib
from lightcc.embedding.initializers import Initializer, Normal, parameters_of
from lightcc.embedding.rules import Rule

DTYPES = {"float32": core.FLOAT32, "float64": core.FLOAT64}
_WIRES = {None: 0, "float16": core.FLOAT16, "bfloat16": core.BFLOAT16}
_STATS = [field[0] for field in lib.Stats._fields_ if field[0] != "size"]
_DEFAULT = Normal(0, 0.01)


class Group:
    """The ranks that share tables, in the library: one for each process set and epoch.

    rank, size: this process's in the set; ranks: those of the world.
    """

    def __init__(self, process_set: ProcessSet):
        rank, size = process_set.rank(), process_set.size()
        if rank is None or size is None:
            raise not_registered(process_set)
        self.process_set, self.rank, self.size, self.ranks = process_set, rank, size, list(process_set.ranks or ())
        self.handle = lib.made("open", process_set.process_set_id, rank, size)
        weakref.finalize(self, lib.close, self.handle).atexit = False  # type: ignore[misc]

    @staticmethod
    def of(process_set: ProcessSet) -> "Group":
        """ValueError before init, for a set that is not registered, and if this rank is not in it."""
        process_set.rank()
        key = core.epoch, process_set.process_set_id, tuple(process_set.ranks or ())
        if key not in _groups:
            for old in [other for other in _groups if other[0] != core.epoch]:
                del _groups[old]
            _groups[key] = Group(process_set)
        return _groups[key]


# Kept, though no table may be left: its calls are numbered, on all ranks alike, and tables go at different times there.
_groups: Dict[Tuple[Any, ...], Group] = {}


class Table:
    """A table of rows by key, spread over the ranks of a process set; each makes it, with the same arguments.

    name: one live table's in the process set. dim: weights of a row, at least 1. dtype: "float32" or "float64", of
    weights, slots and gradients. init: of a row before it is trained. seed: of the initializer, below 2^64.
    wire: "float16" or "bfloat16", in which rows travel; None: as they are. strings: keys are strings, not integers.
    limit_bytes: most memory of this shard, 0 for no limit; an update that needs more fails as a whole, on all ranks.
    Attributes: these; rule, the optimizer's or None; process_set; group; handle.

    Errors: ValueError for a name in use, an argument that is not as above, before init, and without this rank in the
    process set.

    >>> from lightcc import embedding
    >>> table = embedding.Table("user", 4); len(table), 7 in table, table.stats()["rows"]
    (0, False, 0)
    """

    def __init__(self, name: str, dim: int, dtype: str = "float32", init: Initializer = _DEFAULT, seed: int = 0,
                 process_set: ProcessSet = global_process_set, wire: Optional[str] = None, strings: bool = False,
                 limit_bytes: int = 0):
        if dtype not in DTYPES or wire not in _WIRES:
            raise ValueError(f"table {name!r}: dtype={dtype!r}, wire={wire!r}; give float32 or float64, and None, "
                             "float16 or bfloat16.")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"table {name!r}: seed={seed} is not from 0 up to 2^64.")
        kind, a, b = parameters_of(init)
        self.name, self.dim, self.dtype, self.init, self.seed, self.wire = name, dim, dtype, init, seed, wire
        self.strings, self.process_set, self.epoch = strings, process_set, core.epoch
        self.rule: Optional[Rule] = None
        self.group = Group.of(process_set)
        if any(other.name == name and other.group is self.group for other in _alive):
            gc.collect()  # the other table may be garbage that refers to itself, as after an exception
        options = lib.struct(lib.Options, dtype=DTYPES[dtype], dim=dim, name=request.encoded(name), seed=seed, a=a, b=b,
                             init=lib.INITIALIZERS.index(kind), checked=strings, wire=_WIRES[wire],
                             limit_bytes=limit_bytes)
        self._handle: Optional[int] = lib.made("create", self.group.handle, options)
        self._free = weakref.finalize(self, lib.free, self._handle)
        self._free.atexit = False  # type: ignore[misc]
        _alive.add(self)

    @property
    def handle(self) -> int:
        """Of the library. ValueError after close()."""
        if self._handle is None:
            raise ValueError(f"table {self.name!r} was closed.")
        return self._handle

    def attach(self, rule: Rule) -> None:
        """Gives the table its optimizer, once. ValueError if it has another."""
        if self.rule == rule:
            return
        if self.rule is not None:
            raise ValueError(f"table {self.name!r} has the optimizer {self.rule} already, which decides what a row "
                             f"holds; it cannot get {rule}.")
        lib.call("attach", self.handle, lib.struct(lib.Rule, kind=lib.RULES.index(rule.kind), initial=rule.initial,
                                                   terms=rule.terms))
        self.rule = rule

    def close(self) -> None:
        """Frees the shard and the name. Nothing may be asked of the table afterwards."""
        self._handle = None
        self._free()
        _alive.discard(self)

    def stats(self) -> Dict[str, int]:
        """Of this rank's shard: rows; steps (updates, the same on all ranks); record_bytes, of one row with its slots;
        bytes, reserved for rows and index; index_bytes; slabs, the pieces of memory that rows are in; index_growing,
        1 while a larger index is being filled."""
        stats = lib.struct(lib.Stats)
        lib.call("get_stats", self.handle, stats)
        return {name: getattr(stats, name) for name in _STATS}

    def __len__(self) -> int:
        """Rows of this rank's shard."""
        return self.stats()["rows"]

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Union[int, str]) -> bool:
        """Whether the key has a row in this rank's shard."""
        keys = self.local_keys(key)
        found = numpy.zeros(1, numpy.uint8)
        lib.call("contains", self.handle, lib.address(keys), 1, lib.address(found))
        return bool(found[0])

    def local_keys(self, key: Union[int, str]) -> numpy.ndarray:
        """A user's key as the library's, int64. ValueError if it is of the wrong kind."""
        if isinstance(key, str) != self.strings or not isinstance(key, (int, str, numpy.integer)):
            raise ValueError(f"table {self.name!r}: {key!r} is no {'string' if self.strings else 'integer'}.")
        if self.strings:
            text = str(key).encode()
            return kernels.hashed(text, numpy.array([0, len(text)]))[0]
        if not -1 << 63 <= int(key) < 1 << 64:
            raise ValueError(f"table {self.name!r}: {key} does not fit into 64 bits.")
        return numpy.array([int(key) & (1 << 64) - 1], numpy.uint64).view(numpy.int64)


_alive: "weakref.WeakSet[Table]" = weakref.WeakSet()


def _refuse_join() -> None:
    """A rank that has joined owns rows still: what other ranks send for them would be dropped."""
    names = sorted(table.name for table in _alive if table.epoch == core.epoch and table.group.size > 1)
    if names:
        raise ValueError(f"join: table {names[0]!r} has rows on this rank, which the other ranks go on using; call "
                         "serve() of lightcc.torch.embedding instead, which answers them until all ranks have ended.")


request.before_join.append(_refuse_join)
