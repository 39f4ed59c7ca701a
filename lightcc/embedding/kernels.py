"""Kernels on arrays in memory: gathering rows, pooling them, and adding up their gradients. One thread each.

Arrays are contiguous; rows, outputs and gradients have one dtype, float32 or float64; inverse and offsets are int64.
"""
from typing import Optional, Tuple

import numpy

from lightcc.core import lib as core
from lightcc.embedding import lib

DTYPES = {numpy.dtype(numpy.float32): core.FLOAT32, numpy.dtype(numpy.float64): core.FLOAT64}


def gather(rows: numpy.ndarray, inverse: numpy.ndarray, out: numpy.ndarray) -> None:
    """out[i] = rows[inverse[i]]; rows and out have two dimensions.

    >>> import numpy; rows, out = numpy.array([[1.0], [2.0]]), numpy.empty((3, 1))
    >>> gather(rows, numpy.array([1, 0, 1]), out); out.tolist()
    [[2.0], [1.0], [2.0]]
    """
    lib.call("gather", DTYPES[rows.dtype], rows.shape[1], lib.address(rows), lib.address(inverse), len(inverse),
             lib.address(out))


def add_by_row(gradient: numpy.ndarray, inverse: numpy.ndarray, sums: numpy.ndarray) -> None:
    """sums[inverse[i]] += gradient[i], in the order of i.

    >>> import numpy; sums = numpy.zeros((2, 1))
    >>> add_by_row(numpy.array([[1.0], [2.0], [3.0]]), numpy.array([1, 0, 1]), sums); sums.tolist()
    [[2.0], [4.0]]
    """
    lib.call("add_by_row", DTYPES[sums.dtype], sums.shape[1], lib.address(gradient), lib.address(inverse),
             len(inverse), lib.address(sums))


def sum_by_row(gradient: numpy.ndarray, inverse: numpy.ndarray, sums: numpy.ndarray) -> None:
    """The same into memory that holds nothing yet: rows of sums without a gradient get zeros.

    >>> import numpy; sums = numpy.full((3, 1), 9.0)
    >>> sum_by_row(numpy.array([[1.0], [2.0], [3.0]]), numpy.array([1, 0, 1]), sums); sums.tolist()
    [[2.0], [4.0], [0.0]]
    """
    lib.call("sum_by_row", DTYPES[sums.dtype], sums.shape[1], lib.address(gradient), lib.address(inverse),
             len(inverse), len(sums), lib.address(sums))


def pool(rows: numpy.ndarray, inverse: numpy.ndarray, offsets: numpy.ndarray, weights: Optional[numpy.ndarray],
         mode: str, out: numpy.ndarray, largest: Optional[numpy.ndarray]) -> None:
    """out[b] = the sum, mean or max of rows[inverse[i]] (times weights[i]) for i from offsets[b] up to offsets[b + 1].

    largest, for max: int64 of out's shape, the row of each largest element. ValueError for offsets that fall or
    overrun.

    >>> import numpy; out = numpy.empty((2, 1))
    >>> pool(numpy.array([[1.0], [2.0]]), numpy.array([1, 0, 1]), numpy.array([0, 2, 3]), None, "sum", out, None)
    >>> out.tolist()
    [[3.0], [2.0]]
    """
    lib.call("pool", _bags(rows, inverse, offsets, weights, mode), lib.address(out), lib.address(largest))


def add_pooled(rows: numpy.ndarray, inverse: numpy.ndarray, offsets: numpy.ndarray, weights: Optional[numpy.ndarray],
               mode: str, largest: Optional[numpy.ndarray], gradient: numpy.ndarray, sums: numpy.ndarray,
               of_weights: Optional[numpy.ndarray]) -> None:
    """The backward of pool: adds each row's gradient to sums, of rows' shape; of_weights gets that of the weights.

    >>> import numpy; rows, sums = numpy.array([[1.0], [2.0]]), numpy.zeros((2, 1))
    >>> inverse, offsets, gradient = numpy.array([1, 0, 1]), numpy.array([0, 2, 3]), numpy.array([[1.0], [5.0]])
    >>> add_pooled(rows, inverse, offsets, None, "sum", None, gradient, sums, None); sums.tolist()
    [[1.0], [6.0]]
    """
    lib.call("pool_backward", _bags(rows, inverse, offsets, weights, mode), lib.address(gradient),
             lib.address(largest), lib.address(sums), lib.address(of_weights))


def hashed(text: bytes, offsets: numpy.ndarray) -> Tuple[numpy.ndarray, numpy.ndarray]:
    """The keys (int64) and checks (uint32) of strings that are one behind the other, string i from offsets[i].

    >>> import numpy; keys, checks = hashed(b"abab", numpy.array([0, 2, 4])); bool(keys[0] == keys[1])
    True
    """
    keys, checks = numpy.empty(len(offsets) - 1, numpy.int64), numpy.empty(len(offsets) - 1, numpy.uint32)
    lib.call("hash_strings", text, lib.address(offsets), len(keys), lib.address(keys), lib.address(checks))
    return keys, checks


def _bags(rows: numpy.ndarray, inverse: numpy.ndarray, offsets: numpy.ndarray, weights: Optional[numpy.ndarray],
          mode: str) -> lib.Bags:
    return lib.struct(lib.Bags, dtype=DTYPES[rows.dtype], dim=rows.shape[1], mode=lib.MODES.index(mode),
                      count=len(inverse), bags=len(offsets) - 1, inverse=lib.address(inverse),
                      offsets=lib.address(offsets), weights=lib.address(weights), rows=lib.address(rows))
