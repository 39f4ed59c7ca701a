"""The ids that all sides of bench/embedding.py look up: row numbers, and a raw 64-bit key for each.

Zipf: row k of 1...rows has the probability k^-1.05 / sum; drawn by the inverse of its distribution, then permuted, so
that frequent rows are not neighbours. Uniform: every row alike. It needs NumPy alone, since peers have environments of
their own.
"""
from pathlib import Path
from typing import Dict, List

import numpy as np

EXPONENT, SEED = 1.05, 1
KINDS = ("zipf", "uniform")
_ODD = np.uint64(0x9E3779B97F4A7C15)


def batches(kind: str, rows: int, ids: int, count: int, seed: int = SEED) -> np.ndarray:
    """(count, ids) row numbers, int64."""
    generator = np.random.default_rng((seed, KINDS.index(kind)))
    if kind == "uniform":
        return generator.integers(0, rows, (count, ids))
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    ranks = np.searchsorted(cumulative, generator.random((count, ids)) * cumulative[-1])
    return np.random.default_rng(SEED).permutation(rows)[np.minimum(ranks, rows - 1)]


def raw_keys(row_numbers: np.ndarray) -> np.ndarray:
    """A key of 64 bits for each row number, int64; different ones for different rows (the finalizer of SplitMix64)."""
    keys = (row_numbers.astype(np.uint64) + np.uint64(1)) * _ODD
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys ^ (keys >> np.uint64(31))).view(np.int64)


def write(folder: Path, rows: int, ids: int, count: int) -> Dict[str, float]:
    """Files for read(); how many ids of a batch are different, on average."""
    different = {}
    for kind in KINDS:
        some = batches(kind, rows, ids, count)
        np.save(folder / f"{kind}.npy", some)
        different[kind] = float(np.mean([len(np.unique(batch)) for batch in some]))
    return different


def read(folder: Path, kind: str) -> List[np.ndarray]:
    return list(np.load(folder / f"{kind}.npy"))
