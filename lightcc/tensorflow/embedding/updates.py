"""One update of the rows that lookups have found, as an operation of TensorFlow."""
import weakref
from typing import Any, Dict, List, Sequence, Tuple

import tensorflow as tf

from lightcc.core.ops import ReduceOps
from lightcc.embedding.rules import NUMBERS, Rule
from lightcc.embedding.table import after_step
from lightcc.tensorflow.embedding.leaf import Leaf
from lightcc.tensorflow.embedding.library import operations, run


def update_rows(pairs: Sequence[Tuple[Any, Leaf]], rule: Rule, numbers: Dict[str, Any],
                op: int = ReduceOps.Average) -> List[Any]:
    """Sends the gradients of tables to the rows' owners, in one exchange for each process set, and returns what there
    is to run in a graph.

    pairs: gradients that are tf.IndexedSlices of lookups, or None: this rank has none; and the leaves. numbers: those
    of rules.NUMBERS that the rule needs, numbers or tensors. op: Average or Sum of the ranks' gradients.
    Errors: ValueError for a gradient of another kind and for a table that has another rule.

    >>> update_rows([], Rule("sgd"), {"lr": 0.1})
    []
    """
    by_group: Dict[int, List[Tuple[Any, Leaf]]] = {}
    for grad, leaf in pairs:
        if grad is not None and not isinstance(grad, tf.IndexedSlices):
            raise ValueError(f"table {leaf.table.name!r}: its gradient is a {type(grad).__name__}, and not as a "
                             "lookup has made it; only what keeps tf.IndexedSlices may change it.")
        leaf.table.attach(rule)
        by_group.setdefault(id(leaf.table.group), []).append((grad, leaf))
    row_of_numbers = tf.stack([as_double(numbers.get(name, 0.0)) for name in NUMBERS])
    return [_update(of_group, row_of_numbers, op) for of_group in by_group.values()]


def _update(pairs: List[Tuple[Any, Leaf]], numbers: tf.Tensor, op: int) -> Any:
    given = [(grad.values, grad.indices) if grad is not None else
             (tf.zeros([0, leaf.table.dim], leaf.table.dtype), tf.zeros([0], tf.int64)) for grad, leaf in pairs]
    update = run(operations.lightcc_embedding_update, [values for values, _ in given], [tokens for _, tokens in given],
                 tf.tile(numbers[tf.newaxis], [len(pairs), 1]), average=int(op == ReduceOps.Average),
                 tables=" ".join(str(leaf.number) for _, leaf in pairs))
    return _and_after_it(update, [leaf for _, leaf in pairs])


def _and_after_it(update: Any, leaves: List[Leaf]) -> Any:
    """The update, and behind it what Python decides: which rows go. A graph does not keep the tables alive."""
    asking = [weakref.ref(leaf.table) for leaf in leaves if leaf.table.asks_python]
    if not asking:
        return update

    def decide() -> None:
        after_step(table for table in (one() for one in asking) if table is not None)

    if tf.executing_eagerly():
        return decide()
    with tf.control_dependencies([update]), tf.device("CPU:0"):
        return tf.numpy_function(decide, [], [])


def as_double(value: Any) -> tf.Tensor:
    """tf.cast alone would make a float32 of a number first.

    >>> as_double(0.1).numpy().item()
    0.1
    """
    if isinstance(value, (int, float)):
        return tf.constant(value, tf.float64)
    return tf.cast(value, tf.float64)
