"""The plain version of the sparse optimizers, in float64: each rule as its formula says it, one row at a time.

A table is `Table(rule, first)`; `first(key)` is a row's first value. `DenseAdam` is Adam over all rows in every step,
which is what SparseAdam must equal. Notation: t the table's step, tau the row's last, d the width, g the gradient.
"""
import math
from typing import Callable, Dict, Optional, Sequence

import numpy as np


class Row:
    """What a table keeps of a key: x, the slots m, v, z, and the step of its last update."""

    def __init__(self, x: np.ndarray):
        self.x = np.array(x, np.float64)
        self.m, self.v, self.z = np.zeros_like(self.x), np.zeros_like(self.x), np.zeros_like(self.x)
        self.last = 0


class Rule:
    """How one row takes its gradient. alphas: that of each step until now, alphas[0] is not used."""

    def birth(self, row: Row, lr: float) -> None:
        """Slots are zero at birth, but for rules that say otherwise."""

    def update(self, row: Row, g: np.ndarray, lr: float, t: int, alphas: Sequence[float]) -> None:
        raise NotImplementedError

    def alpha(self, lr: float, t: int) -> float:
        return lr

    def read(self, row: Row, t: int, alphas: Sequence[float]) -> np.ndarray:
        """The row's value after step t."""
        return row.x.copy()

    def caught_up(self, row: Row, t: int, alphas: Sequence[float]) -> None:
        """Before the gradient of step t: what the steps since the row's last would have done to it."""


class SGD(Rule):
    def update(self, row, g, lr, t, alphas):
        row.x -= lr * g


class Adagrad(Rule):
    def __init__(self, eps: float = 1e-10, rowwise: bool = False, initial: float = 0.0):
        self.eps, self.rowwise, self.initial = eps, rowwise, initial

    def birth(self, row, lr):
        row.v += self.initial

    def update(self, row, g, lr, t, alphas):
        row.v += np.mean(g * g) if self.rowwise else g * g
        row.x -= lr * g / (np.sqrt(row.v) + self.eps)


class LazyAdam(Rule):
    def __init__(self, betas=(0.9, 0.999), eps: float = 1e-8):
        (self.beta1, self.beta2), self.eps = betas, eps

    def alpha(self, lr, t):
        return lr * math.sqrt(1 - self.beta2 ** t) / (1 - self.beta1 ** t)

    def moments(self, row: Row, g: np.ndarray) -> None:
        row.m = self.beta1 * row.m + (1 - self.beta1) * g
        row.v = self.beta2 * row.v + (1 - self.beta2) * g * g

    def update(self, row, g, lr, t, alphas):
        self.moments(row, g)
        row.x -= alphas[t] * row.m / (np.sqrt(row.v) + self.eps)


class SparseAdam(LazyAdam):
    def __init__(self, betas=(0.9, 0.999), eps: float = 1e-8, terms: int = 192):
        super().__init__(betas, eps)
        self.terms = terms  # 0: all of them

    def missed(self, row: Row, n: int, alphas: Sequence[float]) -> np.ndarray:
        r = self.beta1 / math.sqrt(self.beta2)
        total = sum(alphas[row.last + j] * r ** j for j in range(1, min(n, self.terms or n) + 1))
        return total * row.m / (np.sqrt(row.v) + self.eps) if total else np.zeros_like(row.x)

    def read(self, row, t, alphas):
        return row.x - self.missed(row, t - row.last, alphas)

    def caught_up(self, row, t, alphas):
        n = t - row.last - 1
        if n > 0 and row.last > 0:
            row.x -= self.missed(row, n, alphas)
            row.m *= self.beta1 ** n
            row.v *= self.beta2 ** n
            row.last = t - 1


class Lasso:
    """What GroupAdagrad and GroupAdam share: from z to x."""

    def __init__(self, l1: float, l2: float, l21: float):
        self.l1, self.l2, self.l21 = l1, l2, l21

    def solved(self, z: np.ndarray, lr: float, root: np.ndarray) -> np.ndarray:
        """x for z, which is in units of lr: so the thresholds are times lr too."""
        s = np.clip(z, -self.l1 * lr, self.l1 * lr) - z
        norm, threshold = np.linalg.norm(s), math.sqrt(len(z)) * self.l21 * lr
        if norm <= threshold:
            return np.zeros_like(z)
        return s * (1 - threshold / norm) / (root + 2 * self.l2 * lr)


class GroupAdagrad(Rule):
    """z here is lr times that of the paper: for one lr the same, and exact when lr changes."""

    def __init__(self, l1=0.0, l2=0.0, l21=0.0, initial: float = 0.1):
        self.lasso, self.initial = Lasso(l1, l2, l21), initial

    def birth(self, row, lr):
        """The z for which the rule yields the row's first value."""
        row.v += self.initial
        lasso = self.lasso
        h = (np.sqrt(row.v) + 2 * lasso.l2 * lr) * row.x
        norm = np.linalg.norm(h)
        if norm:
            s = h * (1 + math.sqrt(len(h)) * lasso.l21 * lr / norm)
            row.z = -s - lasso.l1 * lr * np.sign(s)

    def update(self, row, g, lr, t, alphas):
        before = np.sqrt(row.v)
        row.v = row.v + g * g
        row.z = row.z + lr * g - (np.sqrt(row.v) - before) * row.x
        row.x = self.lasso.solved(row.z, lr, np.sqrt(row.v))


def group_adagrad_as_published(x, gradients, lr, l1, l2, l21, initial=0.1):
    """One row with one lr by the formulas of the paper (ECML PKDD 2021), z not times lr."""
    x, d, v = np.array(x, np.float64), len(x), np.full(len(x), initial)
    h = (np.sqrt(v) / lr + 2 * l2) * x
    norm = np.linalg.norm(h)
    s = h * (1 + math.sqrt(d) * l21 / norm) if norm else h
    z = -s - l1 * np.sign(s)
    for g in gradients:
        after = v + g * g
        z = z + g - (np.sqrt(after) - np.sqrt(v)) / lr * x
        v = after
        s = np.clip(z, -l1, l1) - z
        norm = np.linalg.norm(s)
        small = norm <= math.sqrt(d) * l21
        x = np.zeros(d) if small else s * (1 - math.sqrt(d) * l21 / norm) / (np.sqrt(v) / lr + 2 * l2)
    return x


class GroupAdam(LazyAdam):
    def __init__(self, betas=(0.9, 0.999), eps: float = 1e-8, l1=0.0, l2=0.0, l21=0.0):
        super().__init__(betas, eps)
        self.lasso = Lasso(l1, l2, l21)

    def update(self, row, g, lr, t, alphas):
        before, first = np.sqrt(row.v), row.last == 0
        self.moments(row, g)
        row.z = row.z + alphas[t] * row.m - (np.sqrt(row.v) - before + self.eps * first) * row.x
        row.x = self.lasso.solved(row.z, lr, np.sqrt(row.v) + self.eps)


class Table:
    """Rows by key. update(keys, gradients, lr) is one step; a key is there at most once in it."""

    def __init__(self, rule: Rule, first: Callable[[int], np.ndarray]):
        self.rule, self.first = rule, first
        self.rows: Dict[int, Row] = {}
        self.alphas = [0.0]

    def read(self, keys: Sequence[int]) -> np.ndarray:
        t = len(self.alphas) - 1
        return np.array([self.rule.read(self.rows[key], t, self.alphas) if key in self.rows else self.first(key)
                         for key in keys])

    def update(self, keys: Sequence[int], gradients: np.ndarray, lr: float) -> None:
        t = len(self.alphas)
        self.alphas.append(self.rule.alpha(lr, t))
        for key, g in zip(keys, np.asarray(gradients, np.float64)):
            row: Optional[Row] = self.rows.get(key)
            if row is None:
                row = self.rows[key] = Row(self.first(key))
                self.rule.birth(row, lr)
            self.rule.caught_up(row, t, self.alphas)
            self.rule.update(row, g, lr, t, self.alphas)
            row.last = t


class DenseAdam:
    """Adam over all rows, with eps beside the root of v as it is. g is zero where a row has no gradient."""

    def __init__(self, x: np.ndarray, betas=(0.9, 0.999), eps: float = 1e-8):
        self.x, self.betas, self.eps, self.t = np.array(x, np.float64), betas, eps, 0
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)

    def update(self, g: np.ndarray, lr: float) -> None:
        (beta1, beta2), self.t = self.betas, self.t + 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        alpha = lr * math.sqrt(1 - beta2 ** self.t) / (1 - beta1 ** self.t)
        self.x -= alpha * np.divide(self.m, np.sqrt(self.v) + self.eps, out=np.zeros_like(g), where=self.v > 0)
