"""TFPlus's optimizers: those of tf.compat.v1.train for dense variables, which train the rows of kv variables too.

One step of an optimizer sends the gradients of all its kv variables in one exchange. On several ranks both kinds of
gradients are averaged: dense ones by compute_gradients, rows' by their owners.
"""
from typing import Any, Callable, Dict, Iterable, List, Tuple

import tensorflow as tf

from lightcc.embedding.rules import Rule
from lightcc.tensorflow.embedding.leaf import leaf_of
from lightcc.tensorflow.embedding.updates import update_rows
from lightcc.tensorflow.gradient_reducer import _make_allreduce_grads_fn
from lightcc.tensorflow.kv_variable import ordering

Pairs = List[Tuple[Any, Any]]


class _WithRows(tf.compat.v1.train.Optimizer):
    """What these optimizers share; it stands before TensorFlow's own class."""

    _not_to_be_distributed = ("an optimizer of lightcc.tensorflow.kv_variable averages the ranks' gradients itself; "
                              "leave it as it is.")
    _rule: Rule
    _row_numbers: Callable[[], Dict[str, Any]]

    def _has_rule(self, rule: Rule, learning_rate: Any, **numbers: Any) -> None:
        self._rule = rule
        self._row_numbers = lambda: {**numbers, "lr": learning_rate() if callable(learning_rate) else learning_rate}

    def compute_gradients(self, loss, *args, **kwargs) -> Pairs:
        """TensorFlow's own, with dense gradients averaged over the ranks. Arguments: TensorFlow's."""
        lookups = ordering.in_order([loss])
        pairs = super().compute_gradients(loss, *args, **kwargs)
        dense = [pair for pair in pairs if leaf_of(pair[1]) is None]
        reduce = _make_allreduce_grads_fn(self.get_name())
        reduced = iter(reduce([grad for grad, _ in dense], [variable for _, variable in dense]))
        return [(next(reduced) if leaf_of(variable) is None else _after(lookups, grad), variable)
                for grad, variable in pairs]

    def apply_gradients(self, grads_and_vars: Iterable[Tuple[Any, Any]], global_step: Any = None,
                        name: Any = None) -> Any:
        """One step; in a graph the operation that makes it, after which global_step is one more.

        Errors: ValueError as TensorFlow's own, and for gradients of kv variables that are no tf.IndexedSlices; from
        running it those of lightcc.tensorflow.embedding, on every rank.
        """
        pairs = list(grads_and_vars)
        dense = [(grad, variable) for grad, variable in pairs if leaf_of(variable) is None]
        rows = [(grad, leaf) for grad, leaf in ((grad, leaf_of(variable)) for grad, variable in pairs)
                if leaf is not None and grad is not None]
        if not rows:
            return super().apply_gradients(dense or pairs, global_step, name)
        done = []
        if any(grad is not None for grad, _ in dense):
            done.append(super().apply_gradients(dense, name=name))
        ordering.in_order(getattr(grad, "values", grad) for grad, _ in rows)
        with tf.compat.v1.name_scope(name, self.get_name()):
            updates = update_rows(rows, self._rule, self._row_numbers())
            for update in updates:
                ordering.warn_of_two(update, rows[0][1].table.group.size)
            return _counted(done + updates, global_step)


def _after(lookups: List[Any], grad: Any) -> Any:
    """A gradient that is there after these lookups: that of a sum, say, needs no row, and would be sent before."""
    if not lookups or not isinstance(grad, tf.IndexedSlices):
        return grad
    with tf.control_dependencies(lookups):
        return tf.IndexedSlices(tf.identity(grad.values), grad.indices, grad.dense_shape)


def _counted(done: List[Any], global_step: Any) -> Any:
    if tf.executing_eagerly():
        return None if global_step is None else global_step.assign_add(1)
    with tf.control_dependencies(done):
        train = tf.no_op() if global_step is None else tf.group(
            tf.compat.v1.assign_add(global_step, tf.ones([], global_step.dtype.base_dtype)))
    of_graph = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    of_graph[:] = [op for op in of_graph if op not in done] + [train]
    return train


class AdamOptimizer(_WithRows, tf.compat.v1.train.AdamOptimizer):
    """tf.compat.v1.train.AdamOptimizer, and for rows TFPlus's: Adam that leaves a row as it is in the steps that do not
    touch it (lightcc.torch.embedding.LazyAdam).

    version: how TFPlus keeps its slots, without effect here. Other arguments and errors: TensorFlow's.

    >>> from lightcc.tensorflow import kv_variable as kv
    >>> user = kv.get_kv_variable("editor", embedding_dim=2, initializer=tf.zeros_initializer())
    >>> optimizer = kv.AdamOptimizer(0.1)
    >>> optimizer.minimize(lambda: tf.reduce_sum(kv.embedding_lookup(user, [7])), var_list=[user])
    >>> kv.embedding_lookup(user, [7], training=False).numpy().round(4)
    array([[-0.1, -0.1]], dtype=float32)
    """

    def __init__(self, learning_rate: Any = 0.001, beta1: Any = 0.9, beta2: Any = 0.999, epsilon: Any = 1e-8,
                 use_locking: bool = False, name: str = "Adam", version: int = 1):
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        self._has_rule(Rule("lazy_adam"), learning_rate, beta1=beta1, beta2=beta2, eps=epsilon)


class AdagradOptimizer(_WithRows, tf.compat.v1.train.AdagradOptimizer):
    """tf.compat.v1.train.AdagradOptimizer, for rows too. Arguments and errors: TensorFlow's.

    >>> from lightcc.tensorflow import kv_variable as kv; kv.AdagradOptimizer(0.1).get_name()
    'Adagrad'
    """

    def __init__(self, learning_rate: Any, initial_accumulator_value: float = 0.1, use_locking: bool = False,
                 name: str = "Adagrad"):
        super().__init__(learning_rate, initial_accumulator_value, use_locking, name)
        self._has_rule(Rule("adagrad", initial=initial_accumulator_value), learning_rate)


class GroupAdamOptimizer(_WithRows, tf.compat.v1.train.AdamOptimizer):
    """tf.compat.v1.train.AdamOptimizer for dense variables, and for rows Adam with sparse group lasso
    (lightcc.torch.embedding.GroupAdam).

    l1_, l2_, l21_regularization_strength: numbers, at least 0. initial_accumulator_value, accum_name, linear_name:
    of slots that TFPlus's version 4 does not have either; without effect. version: 4, the rule.
    Errors: ValueError for negative numbers and for another version.

    >>> from lightcc.tensorflow import kv_variable as kv; kv.GroupAdamOptimizer(0.1, l21_regularization_strength=1e-4
    ...                                                                         ).get_name()
    'GroupAdam'
    """

    def __init__(self, learning_rate: Any, initial_accumulator_value: float = 0.0, beta1: Any = 0.9,
                 beta2: Any = 0.999, epsilon: Any = 1e-8, l1_regularization_strength: float = 0.0,
                 l2_regularization_strength: float = 0.0, l21_regularization_strength: float = 0.0,
                 use_locking: bool = False, name: str = "GroupAdam", accum_name: Any = None, linear_name: Any = None,
                 version: int = 4):
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name)
        if version != 4:
            raise ValueError(f"GroupAdamOptimizer: version={version!r} of TFPlus's rules is not there; give 4.")
        _expect_not_negative(self, initial_accumulator_value=initial_accumulator_value,
                             l1_regularization_strength=l1_regularization_strength,
                             l2_regularization_strength=l2_regularization_strength,
                             l21_regularization_strength=l21_regularization_strength)
        self._has_rule(Rule("group_adam"), learning_rate, beta1=beta1, beta2=beta2, eps=epsilon,
                       l1=l1_regularization_strength, l2=l2_regularization_strength, l21=l21_regularization_strength)


class SparseGroupFtrlOptimizer(_WithRows, tf.compat.v1.train.FtrlOptimizer):
    """tf.compat.v1.train.FtrlOptimizer for dense variables, and for rows FTRL with sparse group lasso
    (lightcc.torch.embedding.GroupAdagrad), which starts at a row's first value.

    l1_, l2_, l21_regularization_strength: at least 0. initial_accumulator_value: above 0. Others: TensorFlow's.
    Errors: ValueError for other numbers, and for learning_rate_power and l2_shrinkage_regularization_strength, which
    rows do not have, at another value than the default.

    >>> from lightcc.tensorflow import kv_variable as kv; kv.SparseGroupFtrlOptimizer(0.1).get_name()
    'SparseGroupFtrl'
    """

    def __init__(self, learning_rate: Any, learning_rate_power: float = -0.5, initial_accumulator_value: float = 0.1,
                 l1_regularization_strength: float = 0.0, l2_regularization_strength: float = 0.0,
                 l21_regularization_strength: float = 0.0, use_locking: bool = False, name: str = "SparseGroupFtrl",
                 accum_name: Any = None, linear_name: Any = None, l2_shrinkage_regularization_strength: float = 0.0):
        super().__init__(learning_rate, learning_rate_power, initial_accumulator_value, l1_regularization_strength,
                         l2_regularization_strength, use_locking, name, accum_name, linear_name,
                         l2_shrinkage_regularization_strength)
        _expect_not_negative(self, l21_regularization_strength=l21_regularization_strength)
        if not initial_accumulator_value > 0:
            raise ValueError("SparseGroupFtrlOptimizer: initial_accumulator_value=0 divides by zero in a row's first "
                             "step; give a number above 0.")
        if learning_rate_power != -0.5 or l2_shrinkage_regularization_strength != 0:
            raise ValueError(f"SparseGroupFtrlOptimizer: learning_rate_power={learning_rate_power!r} and "
                             f"l2_shrinkage_regularization_strength={l2_shrinkage_regularization_strength!r}: rows are "
                             "trained with -0.5 and 0 only.")
        self._has_rule(Rule("group_adagrad", initial=initial_accumulator_value), learning_rate,
                       l1=l1_regularization_strength, l2=l2_regularization_strength, l21=l21_regularization_strength)


def _expect_not_negative(optimizer: Any, **numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{type(optimizer).__name__}: {name}={value!r} must be at least 0.")
