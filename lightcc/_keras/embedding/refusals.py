"""What Keras would do to a table without a word, and is refused: an optimizer of its own that trains all rows."""
from typing import Any

from lightcc._keras.patches import without_jit, wrap
from lightcc.core.wrapper_class import is_made_with
from lightcc.tensorflow.embedding.leaf import leaf_of


class WithTables:
    """What the classes of all optimizers of models with tables have; optimizer.py."""

    __slots__ = ("_sparse", "_dense_seen", "_process_sets")


def tables_in(optimizer: Any) -> Any:
    """The optimizer, or that in a LossScaleOptimizer, if it is an E.Optimizer; else None.

    >>> tables_in(3) is None
    True
    """
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return next((found for found in candidates if is_made_with(WithTables, found)), None)


def install(keras: Any) -> None:
    """Has Keras's optimizers refuse tables, and XLA an optimizer with tables."""
    wrap(keras.Model, "compile", _compile)
    wrap(keras.optimizers.Optimizer, "build", _build)


_compile = without_jit(lambda optimizer: tables_in(optimizer) is not None, "an E.Optimizer")


def _build(plain):
    def build(self, variables, *args, **kwargs):
        leaves = [leaf for leaf in map(leaf_of, variables) if leaf is not None]
        if leaves and tables_in(self) is None:
            raise ValueError(
                f"table {leaves[0].table.name!r}: a {type(self).__name__} would train every row, and the ranks' own "
                "gradients. Write, with E for lightcc.keras.embedding or lightcc.tensorflow.keras.embedding: "
                f"model.compile(optimizer=E.Optimizer(dense=keras.optimizers.{type(self).__name__}(...), "
                "sparse=E.SparseAdam(1e-3)))")
        return plain(self, variables, *args, **kwargs)
    return build
