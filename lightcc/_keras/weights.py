"""check_weights: whether the ranks hold the same weights of a model of Keras."""
from typing import Any

from lightcc._keras import values
from lightcc.core import weights
from lightcc.core.process_sets import ProcessSet
from lightcc.core.wrapper_arguments import stays_here


def check_weights(backend: Any, model: Any, process_set: ProcessSet) -> None:
    """Compares the trainable variables of a model, or a list of variables, with those of all ranks of the set."""
    if not stays_here(process_set):
        variables = list(getattr(model, "trainable_variables", model))
        weights.compare_in_order(variables, list(map(weights.digest_of, values.read(backend, variables))),
                                 "check_weights", process_set)
