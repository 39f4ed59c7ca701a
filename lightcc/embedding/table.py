"""A table, of which each rank of a process set has a shard: its name, kind, optimizer, and what is asked of one shard.

Lookups and updates, which all ranks make together, are in exchange.py; rows as arrays in rows.py.
"""
import gc
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import numpy

from lightcc.core import lib as core
from lightcc.core import request
from lightcc.core.process_sets import ProcessSet, global_process_set, not_registered
from lightcc.embedding import eviction, kernels, lib
from lightcc.embedding.bloom import Bloom, Watch
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
    min_count: a key gets a row when it has occurred so often in lookups that were trained, over all ranks; before, it
    reads as `absent` in each element, and its gradients are dropped. admission: Bloom(bytes, error), which counts in a
    fixed size; None: exactly.
    evict: which rows go at the end of a step: Ttl, Count, L2, Asking, or a function, which is Asking(function).
    max_rows: of all ranks; above it those go that were trained least recently. 0: no limit.
    Attributes: these; rule, the optimizer's or None; process_set; group; handle; filter, the shape of admission's.

    Errors: ValueError for a name in use, an argument that is not as above, before init, and without this rank in the
    process set.

    >>> from lightcc import embedding
    >>> table = embedding.Table("user", 4); len(table), 7 in table, table.stats()["rows"]
    (0, False, 0)
    """

    def __init__(self, name: str, dim: int, dtype: str = "float32", init: Initializer = _DEFAULT, seed: int = 0,
                 process_set: ProcessSet = global_process_set, wire: Optional[str] = None, strings: bool = False,
                 limit_bytes: int = 0, min_count: int = 1, absent: float = 0.0, evict: Any = None,
                 max_rows: int = 0, admission: Optional[Bloom] = None):
        if dtype not in DTYPES or wire not in _WIRES:
            raise ValueError(f"table {name!r}: dtype={dtype!r}, wire={wire!r}; give float32 or float64, and None, "
                             "float16 or bfloat16.")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"table {name!r}: seed={seed} is not from 0 up to 2^64.")
        if max_rows < 0:
            raise ValueError(f"table {name!r}: max_rows={max_rows} is negative.")
        if admission is not None and not isinstance(admission, Bloom):
            raise TypeError(f"table {name!r}: admission={admission!r}; give Bloom(bytes, error) or None.")
        if admission is not None and min_count == 1:
            raise ValueError(f"table {name!r}: {admission} counts keys up to min_count; give one above 1.")
        self.policy = eviction.policy_of(evict, name)
        self.filter = admission and admission.shape(min_count)
        kind, a, b = parameters_of(init)
        self.name, self.dim, self.dtype, self.init, self.seed, self.wire = name, dim, dtype, init, seed, wire
        self.strings, self.process_set, self.epoch = strings, process_set, core.epoch
        self.rule: Optional[Rule] = None
        self.history: Optional[Tuple[str, int, int]] = None  # lightcc.embedding.delta: a save, deltas since, step
        self.group = Group.of(process_set)
        if any(other.name == name and other.group is self.group for other in _alive):
            gc.collect()  # the other table may be garbage that refers to itself, as after an exception
        self._options = lib.struct(
            lib.Options, dtype=DTYPES[dtype], dim=dim, name=request.encoded(name), seed=seed, a=a, b=b,
            init=lib.INITIALIZERS.index(kind), checked=strings, wire=_WIRES[wire], limit_bytes=limit_bytes,
            max_rows=max_rows)
        self.min_count, self.absent, self.max_rows, self._settled = min_count, absent, max_rows, 0
        self.admission, self._watch = admission, admission and Watch(admission, min_count, name)
        self._handle: Optional[int] = None
        self.on_handle: List[Callable[[], None]] = []  # called when it has another handle, or none
        self._made(self.group)
        _alive.add(self)

    def _made(self, group: Group) -> None:
        self._handle = lib.made("create", group.handle, self._options)
        self._free = weakref.finalize(self, lib.free, self._handle)
        self._free.atexit = False  # type: ignore[misc]
        try:
            lib.call("set_admission", self.handle, self.min_count, self.absent)
            if self.filter:
                lib.call("set_filter", self.handle, self.filter["bytes"], self.filter["hashes"])
            lib.call("set_eviction", self.handle, *eviction.numbers_of(self.policy))
        except Exception:
            self._free()
            raise

    def enter(self) -> None:
        """Takes the shard into the world that there is now, where the process set may have other ranks. Its rows and
        its owner map stay: lightcc.embedding.moving brings rows to their owners. Calls of the world before are void.

        Errors: ValueError before init, and if this rank is not in the process set any more.
        """
        if self.epoch == core.epoch:
            return
        group, before, free = Group.of(self.process_set), self.handle, self._free
        self._made(group)
        lib.call("adopt", self.handle, before)
        left, self.group, self.epoch = self.group, group, core.epoch
        self.tell()
        free()
        del left  # after its table

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
        self.tell()
        self._free()
        _alive.discard(self)

    def has_stepped(self) -> bool:
        """Whether an update was applied since this was asked last. The steps do not say so where a table has gone back
        meanwhile."""
        before, self._settled = self._settled, self.counters().updates
        return before != self._settled

    def tell(self) -> None:
        """Calls those of on_handle."""
        for tell in self.on_handle:
            tell()

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def stats(self) -> Dict[str, Any]:
        """Of this rank's shard: rows; steps (updates, the same on all ranks); record_bytes, of one row with its slots;
        bytes, reserved for rows, index and candidates; index_bytes; slabs, the pieces of memory that rows are in;
        index_growing, 1 while a larger index is being filled; candidates, keys that are counted and have no row yet
        (about how many keys a filter has counted), and candidate_bytes; admitted, keys that became rows after they were
        counted; evicted, rows that went;
        total_rows, of all ranks after the last update, before its evictions; updates that this rank has applied, also
        those that were taken back; and admission_error, a float: the share of further keys that the filter of
        admission= lets in too early now, estimated from this shard's part of it; 0 with exact counts."""
        stats, error = self.counters(), 0.0
        if self.admission is not None:
            error = self.admission.error_of(stats.candidates * self.group.size, self.min_count)
        return {**{name: getattr(stats, name) for name in _STATS}, "admission_error": error}

    @property
    def asks_python(self) -> bool:
        """Whether after_step() has something to do for it."""
        return bool(self.max_rows) or self.admission is not None or isinstance(self.policy, eviction.Asking)

    def look_at_filter(self) -> None:
        """Warns, once, if the filter of admission= lets in more keys too early than it was asked to."""
        if self._watch is not None and not self._watch.has_warned and self.group.rank == 0:
            self._watch.look(self.counters().candidates * self.group.size)

    def counters(self) -> lib.Stats:
        """stats() as the library has it, for whoever asks in each step."""
        stats = lib.struct(lib.Stats)
        lib.call("get_stats", self.handle, stats)
        return stats

    def __len__(self) -> int:
        """Rows of this rank's shard."""
        return int(self.counters().rows)

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


def after_step(tables: Iterable[Table]) -> None:
    """What is to be done once after an update of these tables, which may have been applied; all ranks of their group
    call it together."""
    tables = sorted(tables, key=lambda one: one.name)
    for table in tables:
        table.look_at_filter()
    stepped = [table for table in tables
               if (table.max_rows or isinstance(table.policy, eviction.Asking)) and table.has_stepped()]
    if stepped:
        eviction.after_step(stepped)


def after_step_of_others(group: Group) -> None:
    """On a rank that serves, after each call of the others: what after_step does for the tables that were updated."""
    after_step(table for table in _alive if table.group is group)


def _refuse_join() -> None:
    """A rank that has joined owns rows still: what other ranks send for them would be dropped."""
    names = sorted(table.name for table in _alive if table.epoch == core.epoch and table.group.size > 1)
    if names:
        raise ValueError(f"join: table {names[0]!r} has rows on this rank, which the other ranks go on using; call "
                         "E.serve() of lightcc.torch.embedding or lightcc.tensorflow.embedding instead, which answers "
                         "them until all ranks have ended.")


request.before_join.append(_refuse_join)
