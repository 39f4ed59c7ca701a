"""What Keras would do to a table without a word, and is refused: an optimizer of its own that trains all rows, and a
scaled loss, whose scale each rank would choose by its own gradients."""
from typing import Any

from lightcc._keras.patches import without_jit, wrap
from lightcc.core.wrapper_class import is_made_with
from lightcc.tensorflow.embedding.leaf import leaf_of


class WithTables:
    """What the classes of all optimizers of models with tables have; optimizer.py."""

    __slots__ = ("_sparse", "_dense_seen")


def install(keras: Any) -> None:
    """Has Keras's optimizers refuse tables, and the LossScaleOptimizer of Keras 3 and XLA an optimizer with tables."""
    wrap(keras.Model, "compile", _compile)
    wrap(keras.optimizers.Optimizer, "build", _build)
    if hasattr(keras.optimizers, "LossScaleOptimizer"):  # that of Keras 2 leaves a mark on what it wraps
        wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply)


def scaled() -> ValueError:
    """Of a step in a LossScaleOptimizer."""
    return ValueError("E.Optimizer inside a LossScaleOptimizer, as mixed_float16 puts it there: the ranks would skip "
                      "different steps. Train with float32 or mixed_bfloat16; in Keras 3, model.compile(..., "
                      "auto_scale_loss=False) leaves the loss as it is.")


_compile = without_jit(lambda optimizer: is_made_with(WithTables, optimizer), "an E.Optimizer")


def _build(plain):
    def build(self, variables, *args, **kwargs):
        leaves = [leaf for leaf in map(leaf_of, variables) if leaf is not None]
        if leaves:
            raise ValueError(
                f"table {leaves[0].table.name!r}: a {type(self).__name__} would train every row, and the ranks' own "
                "gradients. Write, with E for lightcc.keras.embedding or lightcc.tensorflow.keras.embedding: "
                f"model.compile(optimizer=E.Optimizer(dense=keras.optimizers.{type(self).__name__}(...), "
                "sparse=E.SparseAdam(1e-3)))")
        return plain(self, variables, *args, **kwargs)
    return build


def _apply(plain):
    def apply(self, *args, **kwargs):
        if is_made_with(WithTables, self.inner_optimizer):
            raise scaled()
        return plain(self, *args, **kwargs)
    return apply
