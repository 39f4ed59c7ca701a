"""The weights of tables for whoever serves them, who needs no lightcc: files of NumPy or Parquet, or any function."""
import importlib
import os
import uuid
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Union

import numpy

from lightcc.core import objects
from lightcc.embedding import lib, rows
from lightcc.embedding.checkpoint import agreed, group_of, write_json
from lightcc.embedding.table import Table

MANIFEST = "export.json"
_SLICE_ROWS = 1 << 16
Sink = Callable[[str, Dict[str, numpy.ndarray]], None]


def export(to: Union[str, Sink], tables: Sequence[Table], min_count: int = 0, min_l2: float = 0.0,
           format: str = "npz") -> int:
    """Gives away the rows of tables as an evaluation reads them, without slots. All ranks call it between two steps.
    Returns how many rows there were, of all ranks. Rows whose weights are all zero are left out.

    to: a folder that all ranks see, with files of at most 65,536 rows, named by export.json, which is written last; or
    a function that each rank calls with a table's name and {"key": int64, "weight": (rows, dim)}, and "check" of
    strings. min_count: only rows of at least so many updates. min_l2: only those whose norm is at least so much.
    format: "npz", or "parquet", which needs pyarrow.
    Errors, on every rank, with an export that was there before still whole: ValueError for another format;
    HorovodInternalError for what a file or the function fails with, and ImportError without pyarrow.

    >>> from lightcc import embedding
    >>> embedding.export(lambda table, columns: None, [embedding.Table("user", 4)])
    0
    """
    if format not in ("npz", "parquet"):
        raise ValueError(f"export: format={format!r}; give npz or parquet.")
    if format == "parquet":
        importlib.import_module("pyarrow.parquet")
    group = group_of(tables, "export")
    identity = objects.broadcast_object(uuid.uuid4().hex, group.ranks[0], "lightcc.embedding.export", group.process_set)

    def work() -> Dict[str, List[Any]]:
        if callable(to):
            return {table.name: _to_sink(to, table, min_count, min_l2) for table in tables}
        os.makedirs(to, exist_ok=True)
        begin = os.path.join(to, f"export-{identity}-{group.rank}")
        return {table.name: _to_files(f"{begin}-{index}", table, min_count, min_l2, format)
                for index, table in enumerate(tables)}
    every = agreed(whatever_fails(work), group, "export")
    if not callable(to):
        manifest = {"format": "lightcc.embedding.export", "version": 1, "tables": {
            table.name: _described(table, [file for of_rank in every for file in of_rank[table.name]])
            for table in tables}}
        agreed(lambda: _write_manifest(to, identity, manifest) if group.rank == 0 else None, group, "export")
    return sum(file["rows"] for of_rank in every for files in of_rank.values() for file in files)


def wanted(table: Table, min_count: int, min_l2: float) -> Iterator[Dict[str, numpy.ndarray]]:
    """The rows of this shard that an export has, in slices."""
    for part in rows.slices(table, _SLICE_ROWS, only=("key", "check", "count")):
        keys, checks = part["key"], part.get("check")
        weights = numpy.empty((len(keys), table.dim), table.dtype)
        lib.call("read", table.handle, lib.address(keys), lib.address(checks), len(keys), lib.address(weights))
        kept = weights.any(axis=1) & (part["count"] >= min_count)
        if min_l2 > 0:
            kept &= numpy.linalg.norm(weights, axis=1) >= min_l2
        if kept.any():
            columns = {"key": keys[kept], "weight": weights[kept]}
            yield columns if checks is None else {**columns, "check": checks[kept]}


def _to_sink(sink: Sink, table: Table, min_count: int, min_l2: float) -> List[Dict[str, Any]]:
    count = 0
    for columns in wanted(table, min_count, min_l2):
        sink(table.name, columns)
        count += len(columns["key"])
    return [{"rows": count}]


def _to_files(begin: str, table: Table, min_count: int, min_l2: float, format: str) -> List[Dict[str, Any]]:
    files = []
    for number, columns in enumerate(wanted(table, min_count, min_l2)):
        path = f"{begin}-{number}.{format}"
        with open(path, "wb") as file:
            _write_parquet(file, columns) if format == "parquet" else numpy.savez(file, **columns)
            file.flush()
            os.fsync(file.fileno())
        files.append({"file": os.path.basename(path), "rows": len(columns["key"])})
    return files


def _write_parquet(file: Any, columns: Mapping[str, numpy.ndarray]) -> None:
    """weight is a list of `dim` numbers a row."""
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    arrays = {name: arrow.array(values) if values.ndim == 1 else
              arrow.FixedSizeListArray.from_arrays(arrow.array(values.reshape(-1)), values.shape[1])
              for name, values in columns.items()}
    parquet.write_table(arrow.table(arrays), file)


def _described(table: Table, files: List[Dict[str, Any]]) -> Dict[str, Any]:
    """history: the save and the number of the delta before this export, for who goes on with deltas."""
    return {"dim": table.dim, "dtype": table.dtype, "step": table.stats()["steps"], "strings": table.strings,
            "absent": table.absent, "history": table.history and list(table.history[:2]), "files": files}


def _write_manifest(path: str, identity: str, manifest: Dict[str, Any]) -> None:
    write_json(path, MANIFEST, manifest)
    for name in os.listdir(path):
        if name.startswith("export-") and not name.startswith(f"export-{identity}-"):
            os.unlink(os.path.join(path, name))


def whatever_fails(work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work, which the other ranks hear of however a user's function fails."""
    def run() -> Any:
        try:
            return work()
        except (OSError, ValueError, MemoryError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
    return run
