"""The optimizer of a Keras model with tables: an optimizer of Keras for its variables, one of tables for its rows.

It is the dense optimizer, in a subclass of its class that gives it the dense variables only: so Keras, callbacks and
DistributedOptimizer's own class find what they know.
"""
import contextlib
import math
from typing import Any, List, Optional, Tuple

import tensorflow as tf

from lightcc._keras.embedding import optimizer_config
from lightcc._keras.embedding.refusals import WithTables
from lightcc._keras.embedding.scaling import finite_everywhere
from lightcc._keras.embedding.zeros import Like, like
from lightcc._keras.optimizer import Legacy, is_distributed, keras_of, members_for
from lightcc.core.wrapper_class import is_made_with, wrapper_class
from lightcc.tensorflow.embedding.leaf import leaf_of
from lightcc.tensorflow.embedding.optimizers import TableOptimizer

Pairs = List[Tuple[Any, Any]]


def Optimizer(dense: Any, sparse: TableOptimizer) -> Any:
    """An optimizer for a model with Embedding layers.

    dense: an optimizer of Keras for all variables that are no tables; on several ranks hvd.DistributedOptimizer(...).
    sparse: one of this package for the rows: SGD, Adagrad, LazyAdam, SparseAdam, GroupAdagrad, GroupAdam.
    Returns what shares all attributes with dense, learning rate and iterations too; `sparse` is an attribute of it.

    In a LossScaleOptimizer, as model.compile puts it for mixed_float16, the ranks have one loss scale, and skip the
    same steps.

    Errors: ValueError for other things than these, for a legacy optimizer of Keras 2, for a LossScaleOptimizer, and for
    one with loss_scale_factor, gradient_accumulation_steps or backward_passes_per_step, of which rows would know
    nothing.

    >>> import keras; from lightcc.keras import embedding as E
    >>> model = keras.Sequential([keras.Input((2,), dtype="int64"), E.Embedding(4, name="item"),
    ...                           keras.layers.Flatten(), keras.layers.Dense(1)])
    >>> dense = hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    >>> model.compile(optimizer=E.Optimizer(dense=dense, sparse=E.SparseAdam(1e-3)), loss="mse")
    >>> history = model.fit(np.array([[7, 1 << 60], [9, 7]]), np.ones((2, 1)), verbose=0)
    """
    if not isinstance(sparse, TableOptimizer):
        raise ValueError(f"Optimizer: sparse={sparse!r} is for the rows of tables: give E.SparseAdam(1e-3), say.")
    if is_made_with(WithTables, dense):
        raise ValueError("Optimizer: dense is an E.Optimizer already.")
    family = members_for(type(dense))
    if family is Legacy:
        raise ValueError("Optimizer: dense is a legacy optimizer of Keras 2; give one of keras.optimizers.")
    if hasattr(dense, "inner_optimizer"):
        raise ValueError("Optimizer: dense is a LossScaleOptimizer, and the rows would get the scaled gradients. Write "
                         "LossScaleOptimizer(E.Optimizer(...)), as model.compile does by itself for mixed_float16.")
    for name in ("loss_scale_factor", "gradient_accumulation_steps"):
        if getattr(dense, name, None):
            raise ValueError(f"Optimizer: dense has {name}={getattr(dense, name)!r}, of which the rows would know "
                             "nothing; leave it out.")
    if is_distributed(dense) and dense._distribution.backward_passes_per_step > 1:
        raise ValueError("Optimizer: dense has backward_passes_per_step > 1, and rows are updated in each pass.")
    plain = type(dense)
    cls = wrapper_class(plain, _Keras3 if hasattr(plain, "stateless_apply") else _Keras2, __name__,
                        plain_as="_as_dense", _not_to_be_distributed=_INSIDE)
    optimizer_config.named_in_files(cls)
    both = cls.__new__(cls)
    object.__setattr__(both, "__dict__", vars(dense))  # past Keras's own __setattr__, which tracks values
    object.__setattr__(both, "_sparse", sparse)
    both._track_trackable(sparse, "sparse", overwrite=True)  # for tf.train.Checkpoint
    if is_distributed(dense):
        object.__setattr__(both, "_made_reducer", dense._reducer)  # it knows which layers are local
    return both


def of_config(keras: Any, config: optimizer_config.Config) -> Any:
    """The optimizer whose get_config has returned this, of a Keras."""
    return Optimizer(optimizer_config.dense_of(keras, config), optimizer_config.sparse_of(keras, config))


_INSIDE = ("write E.Optimizer(dense=hvd.DistributedOptimizer(...), sparse=...): the rows' gradients are summed by "
           "their owners already.")


class _Both(WithTables):
    """What both families have."""

    __slots__ = ()
    _as_dense: Any  # of wrapper_class

    @property
    def sparse(self) -> TableOptimizer:
        return self._sparse

    @property
    def dense_seen(self) -> List[Tuple[Any, Optional[Like]]]:
        """The dense variables of the last step that was traced or made, and what their gradients were like."""
        return getattr(self, "_dense_seen", [])

    @property
    def variables_of_tables(self):
        """Iterations and learning rate of sparse, which Keras does not know."""
        return self._sparse.variables

    def scale_rate_of_rows(self, factor: float) -> None:
        """For lightcc's callbacks of learning rates."""
        self._sparse.scale_rate(factor)

    @property
    def process_sets(self):
        """Whose ranks apply a step together: those of the tables, and last of dense, all of whose ranks then agree."""
        return [*self._process_sets, *([self._distribution.process_set] if is_distributed(self) else [])]

    def get_config(self):
        """Of both optimizers. ValueError for what a file cannot say: optimizer_config.py."""
        plain = type(self).__bases__[0]
        dense = plain.__new__(plain)
        object.__setattr__(dense, "__dict__", vars(self))
        if is_distributed(dense):
            object.__setattr__(dense, "_made_reducer", self._reducer)
        return optimizer_config.config_of(dense, self._sparse)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        keras = keras_of(cls)
        with keras.utils.custom_object_scope(custom_objects or {}):
            return of_config(keras, config)

    def build(self, variables):
        leaves = [leaf for leaf in map(leaf_of, variables) if leaf is not None]
        object.__setattr__(self, "_process_sets", [leaf.table.process_set for leaf in leaves])
        return self._as_dense.build([variable for variable in variables if leaf_of(variable) is None])

    def _without_tables(self, pairs) -> Pairs:
        """The dense pairs, after the tables' own have been applied."""
        pairs = list(pairs)
        of_tables = [pair for pair in pairs if leaf_of(pair[1]) is not None]
        if of_tables:
            self._sparse.apply_gradients(of_tables)
        dense = [pair for pair in pairs if leaf_of(pair[1]) is None]
        object.__setattr__(self, "_dense_seen", [(variable, like(grad)) for grad, variable in dense])
        if not dense:
            self.iterations.assign_add(1)  # which else the dense part does
        return dense


class _Keras3(_Both):
    __slots__ = ()

    @contextlib.contextmanager
    def reduced_for_scale(self, grads, variables):
        """For a LossScaleOptimizer around this one: the gradients, of which apply() then takes the dense ones as they
        are."""
        dense = [i for i, variable in enumerate(variables) if leaf_of(variable) is None]
        if not is_distributed(self) or not dense:
            yield grads
            return
        with self._as_dense.reduced_for_scale([grads[i] for i in dense], [variables[i] for i in dense]) as reduced:
            of_dense = dict(zip(dense, reduced))
            yield [of_dense.get(i, grad) for i, grad in enumerate(grads)]

    def apply(self, grads, trainable_variables=None):
        if trainable_variables is None:
            raise ValueError("apply: give the variables too, so that tables are found among them.")
        dense = self._without_tables(zip(grads, trainable_variables))
        if dense:
            self._as_dense.apply([grad for grad, _ in dense], [variable for _, variable in dense])


class _Keras2(_Both):
    __slots__ = ()

    def compute_gradients(self, loss, var_list, tape=None):
        """As Keras does, and not reduced yet; apply_gradients sees to that."""
        if not callable(loss) and tape is None:
            raise ValueError("`tape` is required when a `Tensor` loss is passed.")
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
                if callable(var_list):
                    var_list = var_list()
        return list(zip(tape.gradient(loss, var_list), var_list))

    def aggregate_gradients(self, grads_and_vars):
        """For a LossScaleOptimizer around this one: the dense gradients reduced, and one more, of no variable, which is
        nan if a gradient of some rank is not finite."""
        pairs = list(grads_and_vars)
        of_tables = [pair for pair in pairs if leaf_of(pair[1]) is not None]
        dense = [pair for pair in pairs if leaf_of(pair[1]) is None]
        object.__setattr__(self, "_process_sets", [leaf_of(variable).table.process_set for _, variable in of_tables])
        pairs = [*of_tables, *(self._as_dense.aggregate_gradients(dense) if dense else [])]
        finite = finite_everywhere([grad for grad, _ in pairs], self.process_sets)
        return [*pairs, (tf.where(finite, 0.0, math.nan), _OF_ALL_RANKS)]

    def apply_gradients(self, grads_and_vars, name=None, skip_gradients_aggregation=False, **options):
        dense = self._without_tables(pair for pair in grads_and_vars if pair[1] is not _OF_ALL_RANKS)
        if not dense:
            return self.iterations
        if not skip_gradients_aggregation and options.pop("experimental_aggregate_gradients", True):
            dense = self._as_dense.aggregate_gradients(dense)
        return self._as_dense.apply_gradients(dense, skip_gradients_aggregation=True,
                                              **({} if name is None else {"name": name}), **options)


_OF_ALL_RANKS = object()  # in the place of the variable of a gradient that has none
