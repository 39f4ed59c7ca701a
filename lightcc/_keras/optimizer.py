"""What turns a Keras optimizer into a distributed one: the members that a subclass of its class gets, so that gradients
are reduced where they arrive, before anything else (clipping, the search for inf and nan, accumulation) sees them.

Keras has had three families of optimizers, each with its own such place:
  Keras 3               apply(gradients, variables)
  Keras 2 since 2.11    aggregate_gradients(pairs), which apply_gradients calls
  Keras 2's legacy ones _aggregate_gradients(pairs), likewise
A LossScaleOptimizer of Keras 2 around one of ours asks it to aggregate before it looks for inf and nan, so all ranks
find the same; for Keras 3, patches.py sees to that. The framework's part, how gradients travel, is in
gradient_reducer.py.
"""
import contextlib
import sys
from types import ModuleType
from typing import Any, List, NamedTuple, Optional, Tuple, Type

from lightcc._keras.frameworks import reducer_for
from lightcc._keras.gradient_reducer import GradientReducer
from lightcc.core.process_sets import ProcessSet
from lightcc.core.wrapper_arguments import Groups
from lightcc.core.wrapper_class import is_made_with


class Options(NamedTuple):
    """How a distributed optimizer's gradients travel; the arguments of DistributedOptimizer."""

    name: Optional[str]
    device_dense: str
    device_sparse: str
    compression: Any
    sparse_as_dense: bool
    gradient_predivide_factor: float
    op: int
    backward_passes_per_step: int
    average_aggregated_gradients: bool
    groups: Groups
    process_set: ProcessSet
    scale_local_gradients: bool


class CallableList(list):
    """A list that can also be called, so that both `optimizer.variables` and `optimizer.variables()` work.

    >>> CallableList([1])()
    [1]
    """

    def __call__(self):
        return self


class Distributed:
    """What the classes of all distributed optimizers have. See wrapper_class."""

    __slots__ = ("_made_reducer",)  # beside __dict__, which is shared with the plain optimizer
    _as_plain: Any  # of wrapper_class
    _distribution: Options  # of the class that is made for an optimizer, so that from_config keeps it

    @property
    def _reducer(self) -> GradientReducer:
        made = getattr(self, "_made_reducer", None)
        if made is None:
            cls = type(self)
            made = reducer_for(framework_of(cls))(self._distribution, cls.__name__)
            object.__setattr__(self, "_made_reducer", made)  # past Keras's own, as it is not the optimizer's state
        return made

    @property
    def _wanted_compression(self):
        return self._reducer.wanted

    @property
    def _agg_helper(self):
        """What adds up gradients for backward_passes_per_step; None if that is 1."""
        return self._reducer.helper

    @property
    def variables(self):
        found = self._as_plain.variables
        return CallableList(found if isinstance(found, list) else found())

    def register_local_var(self, var) -> None:
        """Keeps a variable's gradient on this rank: it is only divided by the size of the process set, unless
        scale_local_gradients=False was given. For what only this rank has, or has otherwise than the others.

        >>> import keras, lightcc.keras as hvd
        >>> layer = keras.layers.Dense(1); layer.build((None, 2))
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)); optimizer.register_local_var(layer.bias)
        """
        self._reducer.keep_local(var)

    def _computed(self, pairs) -> List[Tuple[Any, Any]]:
        """Reduces gradients that the optimizer itself has computed; apply_gradients then takes them as they are."""
        pairs = self._over(self._reducer.reduce, pairs)
        self._reducer.reduced = True
        return pairs

    def _arrived(self, pairs) -> List[Tuple[Any, Any]]:
        return self._over(self._reducer.arrived, pairs)

    def _over(self, reduce, pairs):
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):  # of Keras 2
            check_loss_scale(self)
        pairs = list(pairs)
        variables = [variable for _, variable in pairs]
        return list(zip(reduce([grad for grad, _ in pairs], variables), variables))


class Keras3(Distributed):
    """Those of a keras.optimizers.Optimizer of Keras 3."""

    __slots__ = ()

    def apply(self, grads, trainable_variables=None):
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        apply = self._as_plain.apply
        if not variables or not len(grads):  # Keras says what is missing
            return apply(grads, trainable_variables)
        grads = self._reducer.arrived(list(grads), variables)
        return self._reducer.apply(lambda: apply(grads, trainable_variables), self)

    @contextlib.contextmanager
    def reduced_for_scale(self, grads, variables):
        """For a LossScaleOptimizer around this one: the reduced gradients, which apply() then takes as they are."""
        check_loss_scale(self)
        reduced = self._reducer.arrived(grads, variables)
        self._reducer.reduced = True
        try:
            yield reduced
        finally:
            self._reducer.reduced = False  # also if the step is skipped

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        """As Keras 2 had it, for scripts that call it: the reduced (gradient, variable) pairs of a loss."""
        if self._reducer.framework != "tensorflow":
            raise ValueError("_compute_gradients needs a tf.GradientTape, and Keras runs on "
                             f"{self._reducer.framework}: compute the gradients and call apply().")
        import tensorflow as tf
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        variables = var_list() if callable(var_list) else tf.nest.flatten(var_list)
        grads = tape.gradient(loss, variables, grad_loss)
        return self._computed(zip(grads, variables))


class Keras2(Distributed):
    """Those of a tf.keras.optimizers.Optimizer of Keras 2.11 or later, tf_keras among them."""

    __slots__ = ()

    def aggregate_gradients(self, grads_and_vars):
        return self._arrived(grads_and_vars)

    def compute_gradients(self, loss, var_list, tape=None):
        return self._computed(self._as_plain.compute_gradients(loss, var_list, tape))

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        if grad_loss is not None:
            raise ValueError(f"{type(self).__name__} computes gradients without grad_loss; multiply the loss by it.")
        return self.compute_gradients(loss, var_list, tape)

    def apply_gradients(self, grads_and_vars, name=None, skip_gradients_aggregation=False, **kwargs):
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and kwargs.pop("experimental_aggregate_gradients", True):
            pairs = self.aggregate_gradients(pairs)
        self._reducer.reduced = False
        apply, options = self._as_plain.apply_gradients, {} if name is None else {"name": name}
        return self._reducer.apply(lambda: apply(pairs, skip_gradients_aggregation=True, **options), self, pairs)


class Legacy(Distributed):
    """Those of a tf.keras.optimizers.legacy.Optimizer of Keras 2."""

    __slots__ = ()

    def _aggregate_gradients(self, grads_and_vars):
        return self._arrived(grads_and_vars)

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        return self._computed(self._as_plain._compute_gradients(loss, var_list, grad_loss, tape))

    def get_gradients(self, loss, params):
        return [grad for grad, _ in self._computed(zip(self._as_plain.get_gradients(loss, params), params))]

    def apply_gradients(self, grads_and_vars, name=None, experimental_aggregate_gradients=True):
        pairs = list(grads_and_vars)
        if experimental_aggregate_gradients:
            pairs = self._aggregate_gradients(pairs)
        self._reducer.reduced = False
        apply = self._as_plain.apply_gradients
        return self._reducer.apply(lambda: apply(pairs, name, experimental_aggregate_gradients=False), self, pairs)


def members_for(cls: type) -> Type[Distributed]:
    """The members for an optimizer's class; ValueError if that is no optimizer of Keras."""
    if hasattr(cls, "apply") and hasattr(cls, "stateless_apply"):
        return Keras3
    if hasattr(cls, "aggregate_gradients"):
        return Keras2
    if hasattr(cls, "_aggregate_gradients"):
        return Legacy
    raise ValueError(f"A {cls.__module__}.{cls.__name__} is no optimizer of Keras 3 or of Keras 2.11 and later; for "
                     "tf.compat.v1.train optimizers use lightcc.tensorflow.DistributedOptimizer.")


def keras_of(cls: type) -> ModuleType:
    """The package that an optimizer's class comes from: keras or tf_keras."""
    packages = [base.__module__.split(".")[0] for base in cls.__mro__]
    return sys.modules[next(package for package in packages if package in ("keras", "tf_keras"))]


def framework_of(cls: type) -> str:
    """What an optimizer computes with: tensorflow, or what Keras 3 runs on."""
    return keras_of(cls).backend.backend() if members_for(cls) is Keras3 else "tensorflow"


def distributed_in(optimizer) -> Optional[Distributed]:
    """The optimizer, or that in a LossScaleOptimizer, if it is one of ours."""
    candidates = optimizer, getattr(optimizer, "inner_optimizer", None)
    return next((found for found in candidates if is_made_with(Distributed, found)), None)


def is_distributed(optimizer) -> bool:
    """Whether it is one of ours, or a LossScaleOptimizer around one."""
    return distributed_in(optimizer) is not None


def check_loss_scale(inner) -> None:
    """Ranks must change their loss scales together, so a pass in which gradients stay here must not change any."""
    if inner._agg_helper is not None:
        raise ValueError("A LossScaleOptimizer around a DistributedOptimizer with backward_passes_per_step > 1 would "
                         "scale losses otherwise on each rank. Wrap it the other way round: DistributedOptimizer("
                         "LossScaleOptimizer(optimizer), backward_passes_per_step=...). model.compile puts a "
                         "LossScaleOptimizer around any other optimizer of a mixed_float16 model.")


def build(optimizer, variables: List[Any]) -> None:
    """Makes an optimizer's variables for those of a model, as far as it has not made them yet."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "build"):  # of Keras 2's legacy family
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", getattr(inner, "_built", False)):  # of Keras 3, of Keras 2
        optimizer.build(variables)


def variables_of(optimizer) -> List[Any]:
    """An optimizer's own variables; None has none."""
    found = getattr(optimizer, "variables", [])
    return found if isinstance(found, list) else found()  # a method in Keras 2's legacy family


def hidden_variables_of(optimizer) -> List[Any]:
    """What Keras does not count among an optimizer's variables: in Keras 2 its learning rate, unless that is a
    schedule, and the state of a LossScaleOptimizer; and those of the optimizer of tables in an E.Optimizer."""
    scale, inner = getattr(optimizer, "_loss_scale", None), getattr(optimizer, "inner_optimizer", optimizer)
    candidates = [getattr(optimizer, "learning_rate", None), getattr(scale, "current_loss_scale", None),
                  getattr(scale, "counter", None), *getattr(inner, "variables_of_tables", ())]
    known = {id(variable) for variable in variables_of(optimizer)}
    return [variable for variable in candidates if hasattr(variable, "assign") and id(variable) not in known]
