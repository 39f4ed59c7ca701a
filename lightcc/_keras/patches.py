"""Wraps those methods of Keras' own classes, once, that must know whether an optimizer is distributed, and that by
which fit goes from epoch to epoch.

Nothing changes for models without a distributed optimizer, and for epochs with all their batches.
"""
import functools
import inspect
import sys
from typing import Any, Callable

from lightcc._keras.optimizer import framework_of, is_distributed

_MARK = "_lightcc_wrapped"
epoch_was_cut = False  # the last epoch of the fit that is running has ended before its last batch


def install(keras) -> None:
    """Wraps Model.compile and, of Keras 3, LossScaleOptimizer.apply."""
    wrap(keras.Model, "compile", _compile)
    if hasattr(keras.optimizers, "LossScaleOptimizer"):  # in Keras 2 it is elsewhere, and asks to aggregate
        wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply)


def install_epochs() -> None:
    """Wraps the iterator over the epochs' batches of Keras 3."""
    module = sys.modules.get("keras.src.trainers.epoch_iterator")
    if module is not None:
        wrap(module.EpochIterator, "__iter__", _iter)


def wrap(cls: type, name: str, around: Callable) -> None:
    """Puts around(method) into the place of a method, each `around` once, in the class that it is from."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    plain = vars(owner)[name]
    done = getattr(plain, _MARK, ())
    if around not in done:
        wrapped = functools.wraps(plain)(around(plain))
        setattr(wrapped, _MARK, (*done, around))
        setattr(owner, name, wrapped)


def without_jit(talks: Callable[[Any], bool], what: str) -> Callable:
    """For wrap(): Model.compile that has no XLA where talks(optimizer), named `what`, exchanges something between
    ranks, which XLA cannot compile. jit_compile="auto" is True where there is a GPU."""
    def around(plain):
        signature = inspect.signature(plain)

        def compile(self, *args, **kwargs):
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            if talks(given.arguments.get("optimizer")):
                if given.arguments.get("jit_compile") == "auto":
                    given.arguments["jit_compile"] = False
                elif given.arguments.get("jit_compile"):
                    raise ValueError(f"model.compile(jit_compile=True) with {what}: XLA cannot compile the exchange "
                                     "of gradients. Leave jit_compile out; what is to be compiled, put into a "
                                     "tf.function(jit_compile=True) of its own, inside the model.")
            return plain(*given.args, **given.kwargs)
        return compile
    return around


_compile = without_jit(lambda optimizer: is_distributed(optimizer) and framework_of(type(optimizer)) == "tensorflow",
                       "a DistributedOptimizer")


def _apply(plain):
    """It looks for inf and nan and skips the step if there are any. So gradients must be reduced before, or a rank
    would skip the exchange that the others wait in."""
    def apply(self, grads, trainable_variables=None):
        inner = self.inner_optimizer
        if not hasattr(inner, "reduced_for_scale") or not len(grads):
            return plain(self, grads, trainable_variables)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        with inner.reduced_for_scale(list(grads), variables) as reduced:
            return plain(self, reduced, trainable_variables)
    return apply


def _iter(plain):
    """Keras leaves an epoch early only to end the training. Where another one follows, the data must hear of the end,
    and the next epoch begin with the first of them."""
    def __iter__(self):
        global epoch_was_cut
        left = getattr(self, "_epoch_iterator", None)
        if epoch_was_cut and left is not None and inspect.getgeneratorstate(left) == inspect.GEN_SUSPENDED:
            epoch_was_cut = False
            self.data_adapter.on_epoch_end()
            if self.data_adapter.num_batches:  # else they go on, as they do in Keras
                self._current_iterator = None
        return plain(self)
    return __iter__
