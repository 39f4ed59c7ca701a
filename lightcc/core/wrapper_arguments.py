"""What the wrappers of optimizers and tapes are given, checked, with errors that say what it should be; the same for
every framework, and without importing one."""
import sys
import warnings
from typing import Any, Callable, List, Optional, Union

from lightcc.core.elastic_worker import is_elastic
from lightcc.core.job import size
from lightcc.core.ops import Average
from lightcc.core.process_sets import ProcessSet, global_process_set

Groups = Optional[Union[int, List[List[Any]]]]


def check_predivide(gradient_predivide_factor: float, op: int) -> None:
    """ValueError unless the factor is 1 or the ranks' gradients are averaged.

    >>> check_predivide(2.0, Average)
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average.")


def stays_here(process_set: ProcessSet) -> bool:
    """Whether this rank has nobody to exchange gradients with: it is not in the set, or alone in a world that will not
    grow (HOROVOD_ELASTIC=1 says that it may; then a graph can be traced before init).

    >>> stays_here(hvd.global_process_set) == (hvd.size() == 1)
    True
    """
    if is_elastic() and process_set is global_process_set:
        return False
    return not process_set.included() or (size() == 1 and not is_elastic())


def groups_of(groups: Groups, num_groups: int, is_variable: Callable[[Any], bool], stacklevel: int = 3) -> Groups:
    """The groups that a wrapper is asked for: `groups`, checked, or the deprecated `num_groups`, with a warning.

    None: each gradient for itself. Errors: ValueError unless it is a positive int, or lists of variables of which none
    is there twice.

    >>> groups_of(2, 0, callable)
    2
    """
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`.", DeprecationWarning, stacklevel)
        groups = num_groups if groups is None else groups
    if groups is None or (isinstance(groups, int) and groups > 0):
        return groups
    if not isinstance(groups, list) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ValueError(f"groups should be a positive integer or a list of lists of variables, not {groups!r}.")
    seen = set()
    for variable in (variable for group in groups for variable in group):
        if not is_variable(variable):
            raise ValueError(f"groups must consist of lists of variables, not of {type(variable).__name__}.")
        if id(variable) in seen:
            raise ValueError("A variable can only appear once in groups.")
        seen.add(id(variable))
    return groups


def variables_of(local_layers: Any) -> List[Any]:
    """The trainable variables of Keras layers: one, or a list; None: no layer. ValueError for anything else.

    Layers may be of Keras 3, of Keras 2 or of tf_keras.

    >>> variables_of(None)
    []
    """
    if local_layers is None:
        return []
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    keras = [sys.modules[name] for name in ("keras", "tf_keras") if name in sys.modules]  # who made them imported it
    for layer in layers:
        if not any(isinstance(layer, module.layers.Layer) for module in keras):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}.")
    return [variable for layer in layers for variable in layer.trainable_weights]
