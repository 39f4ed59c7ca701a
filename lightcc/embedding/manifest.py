"""What a checkpoint's manifest says of a table, and the table that it describes."""
import base64
import dataclasses
import zlib
from typing import Any, Dict

import numpy

from lightcc.embedding import lib, owners
from lightcc.embedding.initializers import parameters_of
from lightcc.embedding.rules import NUMBERS, Rule
from lightcc.embedding.table import Table


def described(table: Table) -> Dict[str, Any]:
    """As JSON: what must be equal to load the rows, the optimizer with its last numbers, and the owner map.

    >>> from lightcc import embedding
    >>> described(embedding.Table("user", 4))["dim"]
    4
    """
    of_bucket = numpy.empty(owners.BUCKETS, numpy.uint16)
    lib.call("owners", table.handle, lib.address(of_bucket))
    numbers = numpy.empty(len(NUMBERS), numpy.float64)
    lib.call("numbers", table.handle, lib.address(numbers))
    return {**_kind(table), "rule": table.rule and dataclasses.asdict(table.rule), "numbers": numbers.tolist(),
            "steps": table.stats()["steps"], "filter": table.filter,
            "owners": base64.b64encode(zlib.compress(of_bucket.astype("<u2").tobytes())).decode()}


def expect_same(table: Table, saved: Dict[str, Any], where: str) -> None:
    """ValueError unless a table that was saved as that can be loaded into this one. where: the manifest."""
    for name, value in _kind(table).items():
        if saved[name] != value:
            raise ValueError(f"{where}: table {table.name!r} was saved with {name} {saved[name]}, and has {value} "
                             "here.")
    rule = rule_of(saved)
    if table.rule is not None and rule is not None and table.rule != rule:
        raise ValueError(f"{where}: table {table.name!r} was saved with the optimizer {rule}, and has {table.rule} "
                         "here.")


def rule_of(saved: Dict[str, Any]) -> Any:
    """The rule of a table that was saved, or None."""
    return saved["rule"] and Rule(**saved["rule"])


def owners_of(saved: Dict[str, Any]) -> numpy.ndarray:
    """uint16: the rank of each bucket when it was saved. ValueError for anything but a map."""
    try:
        of_bucket = numpy.frombuffer(zlib.decompress(base64.b64decode(saved["owners"])), "<u2").astype(numpy.uint16)
    except zlib.error as error:
        raise ValueError(f"a table's owner map cannot be read ({error})") from error
    if len(saved["numbers"]) != len(NUMBERS):
        raise ValueError(f"a table's numbers are {saved['numbers']}, not {len(NUMBERS)}")
    if len(of_bucket) != owners.BUCKETS:
        raise ValueError(f"a table's owner map has {len(of_bucket)} buckets, not {owners.BUCKETS}")
    return of_bucket


def restore(table: Table, saved: Dict[str, Any], of_bucket: numpy.ndarray, alphas: numpy.ndarray) -> None:
    """Makes the table what was saved, with these owners and without rows yet."""
    lib.call("clear", table.handle)
    rule = rule_of(saved)
    if rule is not None:
        table.attach(rule)
    lib.call("set_owners", table.handle, lib.address(of_bucket))
    lib.call("set_alphas", table.handle, lib.address(alphas), len(alphas))
    restore_numbers(table, saved)


def restore_numbers(table: Table, saved: Dict[str, Any]) -> None:
    """Those of the optimizer's last update."""
    lib.call("set_numbers", table.handle, lib.address(numpy.array(saved["numbers"], numpy.float64)))


def _kind(table: Table) -> Dict[str, Any]:
    return {"dim": table.dim, "dtype": table.dtype, "strings": table.strings, "seed": table.seed,
            "init": list(parameters_of(table.init))}
