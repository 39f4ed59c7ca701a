"""What a Keras model is called with, by names, as a function of a SavedModel has it."""
import re
from typing import Any, Dict, List, Mapping, Set, Tuple

import tensorflow as tf

SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class Signature:
    """The inputs of a model. specs: by name.

    Made of a model of keras.Input, or of inputs: a structure of tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec
    as the model is called with; the names are those of the specs, the keys of a dictionary, or input_0 and so on.
    Errors: ValueError for a model whose inputs nobody knows, for other things than specs, and for a name that comes
    twice.
    """

    def __init__(self, model: Any, inputs: Any = None):
        self._structure, names = _known(model) if inputs is None else (inputs, _named(inputs))
        flat, names = tf.nest.flatten(self._structure), [identifier(name) for name in names]
        if not flat or not all(isinstance(spec, SPECS) for spec in flat):
            raise ValueError(f"inputs={inputs!r}; give tf.TensorSpec(shape, dtype, name), in the structure that the "
                             "model is called with.")
        self.specs: Dict[str, Any] = {name: with_name(spec, name) for name, spec in zip(names, flat)}
        if len(self.specs) != len(flat):
            raise ValueError(f"the model's inputs are named {names}; give each a name of its own.")

    def packed(self, given: Mapping[str, Any]) -> Any:
        """Inputs by name, as the model is called with them. One that is not given is read by nobody: it is made up."""
        flat = [given[name] if name in given else _made_up(spec) for name, spec in self.specs.items()]
        return tf.nest.pack_sequence_as(self._structure, flat)


def _named(specs: Any) -> List[str]:
    if isinstance(specs, Mapping):
        return sorted(specs)
    return [getattr(spec, "name", None) or f"input_{i}" for i, spec in enumerate(tf.nest.flatten(specs))]


def _known(model: Any) -> Tuple[Any, List[str]]:
    """The specs and names of a model that was made of keras.Input."""
    try:
        structure = (getattr(model, "_functional", None) or model).input  # what a Sequential of Keras 3 has inside
    except (AttributeError, ValueError):
        structure = None
    if structure is None:
        raise ValueError(f"{model.name}: its inputs are not known, as it was not made of keras.Input; give inputs=, "
                         "specs in the structure that it is called with.")
    tensors = tf.nest.flatten(structure)
    names = list(getattr(model, "input_names", None) or [tensor.name for tensor in tensors])
    return tf.nest.map_structure(_spec, structure), names


def _spec(tensor: Any) -> Any:
    """Of a KerasTensor, of Keras 2 or of Keras 3."""
    known = getattr(tensor, "type_spec", None)
    if known is not None:
        return known
    if getattr(tensor, "sparse", False):
        return tf.SparseTensorSpec(tensor.shape, tensor.dtype)
    if getattr(tensor, "ragged", False):
        return tf.RaggedTensorSpec(tensor.shape, tensor.dtype, tensor.ragged_rank or 1)
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def identifier(name: str) -> str:
    """As TensorFlow has the names of a function's arguments: what is no letter, digit or _ becomes _.

    >>> identifier("an.input")
    'an_input'
    """
    return re.sub(r"^(?=\d|$)", "input_", re.sub(r"\W", "_", name, flags=re.ASCII))


def with_name(spec: Any, name: str) -> Any:
    """The same spec; of a dense tensor with a name, which an input of a signature has."""
    return tf.TensorSpec(spec.shape, spec.dtype, name) if isinstance(spec, tf.TensorSpec) else spec


def _made_up(spec: Any) -> Any:
    """A tensor of a spec, of any size where the spec has none."""
    def component(one):
        shape = [1 if size is None else size for size in one.shape]
        value = tf.fill(shape, "") if one.dtype == tf.string else tf.zeros(shape, one.dtype)
        return tf.compat.v1.placeholder_with_default(value, one.shape)
    flat = [component(one) for one in tf.nest.flatten(spec, expand_composites=True)]
    return tf.nest.pack_sequence_as(spec, flat, expand_composites=True)


def named(outputs: Any) -> Dict[str, Any]:
    """What a model returns, by the keys of its dictionary, or as output_0 and so on."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    return {f"output_{i}": one for i, one in enumerate(tf.nest.flatten(outputs))}


def read_for(outputs: Any, inputs: Mapping[str, Any]) -> Set[str]:
    """The names of those inputs that the outputs depend on, in the graph that is being traced."""
    waiting = [tensor.op for tensor in tf.nest.flatten(outputs, expand_composites=True)]
    seen = set()
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return {name for name, one in inputs.items()
            if any(part.op in seen for part in tf.nest.flatten(one, expand_composites=True))}
