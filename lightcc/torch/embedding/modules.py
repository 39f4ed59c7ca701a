"""Layers whose rows are in a table: HashEmbedding, one row an id, and HashEmbeddingBag, one pooled row a bag of ids."""
from typing import Any, Dict, List, Optional

import numpy
import torch

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding.bloom import Bloom
from lightcc.embedding.initializers import Initializer, Normal
from lightcc.embedding.statistics import statistics
from lightcc.embedding.table import Table
from lightcc.torch.embedding.gathering import Bags, gathered, pooled
from lightcc.torch.embedding.keys import Ids, array_of, keys_of
from lightcc.torch.embedding.lookups import Wanted, lookup
from lightcc.torch.embedding.parameter import TableParameter

_DTYPES = {torch.float32: "float32", torch.float64: "float64"}
_DEFAULT = Normal(0, 0.01)
_WIRES = {None: None, torch.float16: "float16", torch.bfloat16: "bfloat16"}


class _OfTable(torch.nn.Module):
    """A module with a table, which may be another module's too."""

    _parameter: TableParameter

    def __init__(self, dim: Optional[int], name: Optional[str], init: Initializer, dtype: torch.dtype, seed: int,
                 process_set: ProcessSet, wire: Optional[torch.dtype], strings: bool, limit_bytes: int,
                 table: Optional["_OfTable"], **life: Any):
        super().__init__()
        if table is not None:
            if name is not None or dim not in (None, table.dim):
                raise ValueError(f"{type(self).__name__}(table=...): the table has its name, {table.name!r}, and its "
                                 f"dim, {table.dim}, already.")
            self.__dict__["_parameter"] = table._parameter
            return
        if dim is None or name is None:
            raise ValueError(f"{type(self).__name__}: give dim and name, or the module whose table it shares (table=).")
        if dtype not in _DTYPES:
            raise ValueError(f"table {name!r}: dtype={dtype}; rows are torch.float32 or torch.float64.")
        if wire not in _WIRES:
            raise ValueError(f"table {name!r}: wire={wire}; rows travel as torch.float16, torch.bfloat16, or as "
                             "they are (None).")
        # Not registered as a parameter: DistributedDataParallel, state_dict() and broadcast_parameters must not see it.
        self.__dict__["_parameter"] = TableParameter(
            Table(name, dim, _DTYPES[dtype], init, seed, process_set, _WIRES[wire], strings, limit_bytes, **life))

    @property
    def table(self) -> Table:
        """The table itself: lightcc.embedding.Table."""
        return self._parameter.table

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def dim(self) -> int:
        return self.table.dim

    def stats(self) -> Dict[str, Any]:
        """What lightcc.embedding.Table.stats says of this rank's shard."""
        return self.table.stats()

    def statistics(self) -> Dict[str, float]:
        """Of all ranks together, which all call it: lightcc.embedding.statistics."""
        return statistics(self.table)

    def __len__(self) -> int:
        """Rows of this rank's shard."""
        return len(self.table)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, key: Any) -> bool:
        """Whether the key has a row in this rank's shard."""
        return key in self.table

    def extra_repr(self) -> str:
        return f"{self.dim}, name={self.name!r}"

    def _keys(self, ids: Ids) -> numpy.ndarray:
        return array_of(ids, self.name, self.table.strings)

    def is_trained(self) -> bool:
        """Whether a lookup now is for training."""
        return self.training and torch.is_grad_enabled()


class HashEmbedding(_OfTable):
    """Rows of a table by id: any 64-bit integer or string is a key, and no size is given.

    A row is born when it is first trained; until then its key reads as the initializer's value for it, which is the
    same on any number of ranks. In eval() and under no_grad() nothing is inserted.

    dim: elements of a row, at least 1. name: of the table, the same on all ranks, and no other live table's.
    init: Normal(mean, std) (default: 0, 0.01), Uniform, Constant, Zeros. dtype: torch.float32 (default) or float64.
    seed: of the initializer. process_set: the ranks that the rows are spread over and that call forward, all of them in
    the same order. wire: torch.float16 or bfloat16: rows travel as these; None: as they are.
    strings: ids are strings, not integers. limit_bytes: most memory of this rank's shard, 0 for no limit.
    min_count: a key gets a row when it has occurred so often in lookups that were trained, over all ranks; before, it
    reads as `absent` in each element. admission: Bloom(bytes, error), which counts in a fixed size; None: exactly, at
    14 to 18 bytes a key. evict: which rows go at the end of a step: Ttl, Count, L2, Asking or a function.
    max_rows: most rows of all ranks, 0 for no limit.
    table: instead of dim and name, another module: both use its table.

    forward(ids, mask=None): ids, integers of any shape on the CPU, or strings (a list or a NumPy array); mask, bool of
    the same shape: positions that are False are zero and are not looked up. Returns ids.shape + (dim,) of dtype.

    Errors: ValueError for a float or a GPU tensor as ids, a mask of another shape, a name in use, a process set without
    this rank; HorovodInternalError, on every rank, if ranks differ in the table's dim, dtype, init, seed or optimizer.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(16, name="user", init=E.Normal(0, 0.01))
    >>> user(torch.tensor([[1 << 60, -5], [7, 7]])).shape
    torch.Size([2, 2, 16])
    """

    def __init__(self, dim: Optional[int] = None, name: Optional[str] = None, init: Initializer = _DEFAULT, *,
                 dtype: torch.dtype = torch.float32, seed: int = 0, process_set: ProcessSet = global_process_set,
                 wire: Optional[torch.dtype] = None, strings: bool = False, limit_bytes: int = 0,
                 min_count: int = 1, absent: float = 0.0, evict: Any = None, max_rows: int = 0,
                 admission: Optional[Bloom] = None, table: Optional[_OfTable] = None):
        super().__init__(dim, name, init, dtype, seed, process_set, wire, strings, limit_bytes, table,
                         min_count=min_count, absent=absent, evict=evict, max_rows=max_rows, admission=admission)

    def forward(self, ids: Ids, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        return lookup([(self, ids, mask)])[0]

    def wanted(self, ids: Ids, mask: Optional[torch.Tensor] = None) -> Wanted:
        """What lookup(ids, mask) needs."""
        array, training, dim, strings = self._keys(ids), self.is_trained(), self.dim, self.table.strings
        shape = array.shape
        if mask is None:
            return Wanted(self._parameter, keys_of(array, strings), training,
                          lambda pending, inverse: gathered(pending, inverse, training).view(*shape, dim))
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.shape != shape:
            raise ValueError(f"table {self.name!r}: the mask must be a bool tensor of the ids' shape {shape}.")

        def output(pending, inverse):
            rows = gathered(pending, inverse, training)
            return rows.new_zeros((*shape, dim)).masked_scatter(mask.unsqueeze(-1), rows)
        return Wanted(self._parameter, keys_of(array[mask.numpy()], strings), training, output)


class HashEmbeddingBag(_OfTable):
    """Sums, means or maxima of rows of a table, as torch.nn.EmbeddingBag; the rows are those of HashEmbedding.

    mode: "sum", "mean" (default) or "max". The other arguments: those of HashEmbedding.

    forward(ids, offsets=None, per_sample_weights=None): ids of two dimensions are bags of equal length, and offsets is
    None; of one dimension, offsets (integers, one-dimensional) says where each bag begins: not falling, the first 0,
    none beyond the ids. per_sample_weights: of the ids' shape and the table's dtype, for mode="sum" only, may need
    gradients. Returns (bags, dim) of the table's dtype; an empty bag is zero.

    Errors: those of HashEmbedding; ValueError for offsets that fall or overrun, and for weights of another shape.
    Source: torch.nn.EmbeddingBag.

    >>> from lightcc.torch import embedding as E
    >>> tags = E.HashEmbeddingBag(2, name="tags", init=E.Constant(1.0), mode="sum")
    >>> tags(torch.tensor([4, 5, 6]), torch.tensor([0, 2])).tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    """

    def __init__(self, dim: Optional[int] = None, name: Optional[str] = None, init: Initializer = _DEFAULT, *,
                 mode: str = "mean", dtype: torch.dtype = torch.float32, seed: int = 0,
                 process_set: ProcessSet = global_process_set, wire: Optional[torch.dtype] = None,
                 strings: bool = False, limit_bytes: int = 0, min_count: int = 1, absent: float = 0.0,
                 evict: Any = None, max_rows: int = 0, admission: Optional[Bloom] = None,
                 table: Optional[_OfTable] = None):
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"HashEmbeddingBag: mode={mode!r}; give 'sum', 'mean' or 'max'.")
        super().__init__(dim, name, init, dtype, seed, process_set, wire, strings, limit_bytes, table,
                         min_count=min_count, absent=absent, evict=evict, max_rows=max_rows, admission=admission)
        self.mode = mode

    def forward(self, ids: Ids, offsets: Optional[torch.Tensor] = None,
                per_sample_weights: Optional[torch.Tensor] = None) -> torch.Tensor:
        return lookup([(self, ids, offsets, per_sample_weights)])[0]

    def wanted(self, ids: Ids, offsets: Optional[torch.Tensor] = None,
               per_sample_weights: Optional[torch.Tensor] = None) -> Wanted:
        """What lookup(ids, offsets, per_sample_weights) needs."""
        array, training = self._keys(ids), self.is_trained()
        bags = Bags(self._offsets(array.shape, offsets), self.mode)
        weights = self._weights(array.shape, per_sample_weights)
        return Wanted(self._parameter, keys_of(array, self.table.strings), training,
                      lambda pending, inverse: pooled(pending, inverse, bags, weights, training))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def _offsets(self, shape, offsets: Optional[torch.Tensor]) -> torch.Tensor:
        """With the number of ids at the end."""
        if offsets is None:
            if len(shape) != 2:
                raise ValueError(f"table {self.name!r}: ids of shape {shape} need offsets; only ids of two dimensions "
                                 "are bags by themselves.")
            return torch.arange(shape[0] + 1) * shape[1]
        offsets = torch.as_tensor(offsets)
        if len(shape) != 1 or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"table {self.name!r}: offsets must be a one-dimensional integer tensor, and the ids with "
                             f"it have one dimension, not the shape {shape}.")
        whole = torch.cat([offsets.long(), torch.tensor(shape)])
        if len(offsets) and whole[0] or not len(offsets) and shape[0]:
            raise ValueError(f"table {self.name!r}: the first offset must be 0.")
        if (wrong := torch.nonzero(whole.diff() < 0)).numel():
            at = int(wrong[0])
            this, following = int(whole[at]), int(whole[at + 1])
            raise ValueError(f"table {self.name!r}: offset {at + 1} falls, from {this} to {following}."
                             if at + 1 < len(offsets) else
                             f"table {self.name!r}: offset {at} is {this}, and there are {shape[0]} ids.")
        return whole

    def _weights(self, shape, weights: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if weights is None:
            return None
        if self.mode != "sum":
            raise ValueError(f"table {self.name!r}: per_sample_weights are for mode='sum', not {self.mode!r}.")
        if tuple(weights.shape) != shape:
            raise ValueError(f"table {self.name!r}: per_sample_weights have the shape {tuple(weights.shape)}, the ids "
                             f"{shape}.")
        return weights.to(self._parameter.dtype).reshape(-1).contiguous()


def tables(model: torch.nn.Module) -> List[TableParameter]:
    """The tables of a model, for a sparse optimizer: one parameter each, in the order of model.modules().

    >>> from lightcc.torch import embedding as E
    >>> E.tables(torch.nn.Sequential(E.HashEmbedding(4, name="user"), torch.nn.Linear(4, 1)))
    [TableParameter('user', dim=4)]
    """
    found = {id(m._parameter): m._parameter for m in model.modules() if isinstance(m, _OfTable)}
    return list(found.values())


def dense_parameters(model: torch.nn.Module) -> List[torch.nn.Parameter]:
    """The parameters of a model that are no tables, for any optimizer of torch.

    >>> from lightcc.torch import embedding as E
    >>> len(E.dense_parameters(torch.nn.Sequential(E.HashEmbedding(4, name="user"), torch.nn.Linear(4, 1))))
    2
    """
    return list(model.parameters())


