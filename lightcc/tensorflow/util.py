"""Eager or not, and variables of TensorFlow and Keras under one roof. Names as in horovod.tensorflow.util."""
from typing import Any, Tuple, Union

import tensorflow as tf


def _executing_eagerly() -> bool:
    """Whether operations run as they are called: not in a v1 graph, and not while a tf.function is traced."""
    return tf.executing_eagerly()


def tf_variable(variable) -> tf.Variable:
    """The tf.Variable that a variable is, or that Keras 3 keeps inside its own. ValueError for anything else.

    >>> x = tf.Variable(1.0); tf_variable(x) is x
    True
    """
    inner = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    if not isinstance(inner, tf.Variable):
        raise ValueError(f"A {type(variable).__name__} is no variable: give a tf.Variable, or a Keras variable that "
                         "has been built.")
    return inner


class _Reference:
    """Like tf.Variable.ref(), for Keras 3's variables, which have none and cannot be hashed."""

    def __init__(self, variable):
        self._variable = variable

    def deref(self):
        return self._variable

    def __hash__(self):
        return id(self._variable)

    def __eq__(self, other):
        return isinstance(other, _Reference) and self._variable is other._variable


def vars_to_refs(vars) -> Union[Tuple, Any]:
    """Makes a tuple of hashable references of a list of variables, which may hold further lists; one reference of one
    variable. Equal for the same variables.

    >>> x, y = tf.Variable(1.0), tf.Variable(2.0)
    >>> {vars_to_refs([x, [y]]): "seen"}[vars_to_refs([x, [y]])]
    'seen'
    """
    if isinstance(vars, (list, tuple)):
        return tuple(vars_to_refs(entry) for entry in vars)
    return vars.ref() if hasattr(vars, "ref") else _Reference(vars)


def refs_to_vars(refs):
    """The (nested) list of variables that vars_to_refs was given.

    >>> x = tf.Variable(1.0); refs_to_vars(vars_to_refs([x]))[0] is x
    True
    """
    return [refs_to_vars(entry) for entry in refs] if isinstance(refs, tuple) else refs.deref()
