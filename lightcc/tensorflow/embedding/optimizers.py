"""Optimizers of tables. Their rules are those of lightcc.torch.embedding, whose pages say what each computes.

apply_gradients() sends the gradients of all tables to the rows' owners in one exchange, which all ranks of the tables'
process set take part in, also one that has looked up nothing. A row that no rank has looked up is not touched.
"""
import inspect
import math
from typing import Any, Dict, Iterable, List, Tuple

import tensorflow as tf

from lightcc.core.ops import ReduceOps
from lightcc.embedding.rules import Rule
from lightcc.tensorflow.embedding.leaf import Leaf, leaf_of
from lightcc.tensorflow.embedding.updates import as_double, update_rows


class TableOptimizer(tf.Module):
    """What the optimizers of tables share. iterations: a variable, the updates made. schedule: of the learning rate, or
    None."""

    _arguments: Dict[str, Any]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        made = super().__new__(cls)
        given = inspect.signature(cls.__init__).bind(made, *args, **options)
        given.apply_defaults()
        object.__setattr__(made, "_arguments", dict(list(given.arguments.items())[1:]))  # past TensorFlow's tracking
        return made

    def __init__(self, learning_rate: Any, rule: Rule, op: int, **numbers: float):
        super().__init__()
        if op not in (ReduceOps.Average, ReduceOps.Sum):
            raise ValueError(f"{type(self).__name__}: op={op!r}; give hvd.Average or hvd.Sum.")
        for name, value in numbers.items():
            self._expect(name, value, most=1 if name.startswith("beta") else math.inf)
        self._rule, self._op, self._numbers = rule, op, numbers
        self.iterations = tf.Variable(0, trainable=False, dtype=tf.int64, name="iterations")
        self.schedule = learning_rate if callable(learning_rate) else None
        if self.schedule is None:
            self._expect("learning_rate", learning_rate)
        self._first_rate = learning_rate
        self._rate = tf.Variable(0.0 if self.schedule else learning_rate, trainable=False, dtype=tf.float64,
                                 name="learning_rate")

    @property
    def learning_rate(self) -> Any:
        """A variable, which may be set between steps; of a schedule, what it gives for the next step."""
        return self._rate if self.schedule is None else self.schedule(self.iterations)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        if self.schedule is not None:
            raise ValueError(f"{type(self).__name__}: its learning rate is that of a schedule, and cannot be set.")
        self._rate.assign(as_double(value))

    def get_config(self) -> Dict[str, Any]:
        """The arguments that it was made with, by name.

        >>> from lightcc.tensorflow import embedding as E; E.Adagrad(0.5, rowwise=True).get_config()["rowwise"]
        True
        """
        return dict(self._arguments)

    def scale_rate(self, factor: float) -> None:
        """Sets the learning rate to that of the beginning times a factor; a schedule stays as it is."""
        if self.schedule is None:
            self.learning_rate = self._first_rate * factor

    def apply_gradients(self, grads_and_vars: Iterable[Tuple[Any, Any]]) -> None:
        """One update of every row that some rank has a gradient for.

        grads_and_vars: what a tape gave for the variables of tables, in the same order on all ranks; None: this rank
        has none. A lookup's gradient may be applied once.
        Errors: ValueError for variables of no table, for a table that another kind of optimizer has, and for gradients
        that are no tf.IndexedSlices. With nothing applied, on every rank: tf.errors.InvalidArgumentError that names
        rank, table and key for a gradient that is not finite, FailedPreconditionError for tables that differ;
        HorovodInternalError if a rank is lost or its memory does not suffice.
        """
        pairs: List[Tuple[Any, Leaf]] = []
        for grad, variable in grads_and_vars:
            leaf = leaf_of(variable)
            if leaf is None:
                raise ValueError(f"{type(self).__name__} is for the variables of tables, and {variable.name} is none: "
                                 "give it to another optimizer.")
            pairs.append((grad, leaf))
        update_rows(pairs, self._rule, {**self._numbers, "lr": self.learning_rate}, self._op)
        self.iterations.assign_add(1)

    def _expect(self, name: str, value: float, most: float = math.inf) -> None:
        if not 0 <= value < most:
            raise ValueError(f"{type(self).__name__}: {name}={value!r} must be at least 0 and below {most}.")


class SGD(TableOptimizer):
    """x -= lr * g.

    learning_rate: at least 0, or a schedule of Keras. op: hvd.Average (default; divides by the number of ranks, as
    DistributedOptimizer does) or hvd.Sum. Errors: ValueError for other values.

    >>> from lightcc.tensorflow import embedding as E
    >>> user, sparse = E.HashEmbedding(2, name="user", init=E.Zeros()), E.SGD(0.5)
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(user([7]))
    >>> sparse.apply_gradients(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))
    >>> user([7], training=False).numpy().tolist()
    [[-0.5, -0.5]]
    """

    def __init__(self, learning_rate: Any = 1e-3, *, op: int = ReduceOps.Average):
        super().__init__(learning_rate, Rule("sgd"), op)


class Adagrad(TableOptimizer):
    """lightcc.torch.embedding.Adagrad. initial_accumulator_value, epsilon: at least 0. Others: those of SGD.

    >>> from lightcc.tensorflow import embedding as E; E.Adagrad(0.01, rowwise=True).learning_rate.numpy().item()
    0.01
    """

    def __init__(self, learning_rate: Any = 1e-2, epsilon: float = 1e-10, *, rowwise: bool = False,
                 initial_accumulator_value: float = 0.0, op: int = ReduceOps.Average):
        self._expect("initial_accumulator_value", initial_accumulator_value)
        rule = Rule("rowwise_adagrad" if rowwise else "adagrad", initial=initial_accumulator_value)
        super().__init__(learning_rate, rule, op, eps=epsilon)


class LazyAdam(TableOptimizer):
    """lightcc.torch.embedding.LazyAdam: Adam that leaves a row as it is in the steps that do not touch it. beta_1,
    beta_2: at least 0 and below 1; epsilon: at least 0. Others: those of SGD.

    >>> from lightcc.tensorflow import embedding as E; E.LazyAdam(0.01, beta_2=0.99).learning_rate.numpy().item()
    0.01
    """

    def __init__(self, learning_rate: Any = 1e-3, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
                 *, op: int = ReduceOps.Average):
        super().__init__(learning_rate, Rule("lazy_adam"), op, beta1=beta_1, beta2=beta_2, eps=epsilon)


class SparseAdam(TableOptimizer):
    """lightcc.torch.embedding.SparseAdam: Adam as if every row were updated in every step, as keras.optimizers.Adam
    does it, at the cost of the rows that are looked up. terms: of the sum over missed steps; 0: all of them. Others:
    those of LazyAdam.

    >>> from lightcc.tensorflow import embedding as E; E.SparseAdam(0.01).iterations.numpy().item()
    0
    """

    def __init__(self, learning_rate: Any = 1e-3, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
                 *, terms: int = 192, op: int = ReduceOps.Average):
        self._expect("terms", terms)
        super().__init__(learning_rate, Rule("sparse_adam", terms=terms), op, beta1=beta_1, beta2=beta_2, eps=epsilon)


class GroupAdagrad(TableOptimizer):
    """lightcc.torch.embedding.GroupAdagrad: Adagrad with sparse group lasso. l1, l2, l21: penalties, at least 0.
    initial_accumulator_value: above 0. Others: those of SGD.

    >>> from lightcc.tensorflow import embedding as E; E.GroupAdagrad(0.01, l21=1e-4).learning_rate.numpy().item()
    0.01
    """

    def __init__(self, learning_rate: Any = 1e-2, *, l1: float = 0.0, l2: float = 0.0, l21: float = 0.0,
                 initial_accumulator_value: float = 0.1, op: int = ReduceOps.Average):
        if not initial_accumulator_value > 0:
            raise ValueError(f"GroupAdagrad: initial_accumulator_value={initial_accumulator_value!r} must be above 0.")
        super().__init__(learning_rate, Rule("group_adagrad", initial=initial_accumulator_value), op, l1=l1, l2=l2,
                         l21=l21)


class GroupAdam(TableOptimizer):
    """lightcc.torch.embedding.GroupAdam: LazyAdam with sparse group lasso. Arguments: those of LazyAdam, and l1, l2 and
    l21 of GroupAdagrad.

    >>> from lightcc.tensorflow import embedding as E; E.GroupAdam(0.01, l1=1e-5).learning_rate.numpy().item()
    0.01
    """

    def __init__(self, learning_rate: Any = 1e-3, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-8,
                 *, l1: float = 0.0, l2: float = 0.0, l21: float = 0.0, op: int = ReduceOps.Average):
        super().__init__(learning_rate, Rule("group_adam"), op, beta1=beta_1, beta2=beta_2, eps=epsilon, l1=l1, l2=l2,
                         l21=l21)
