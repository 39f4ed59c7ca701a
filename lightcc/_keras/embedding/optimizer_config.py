"""An E.Optimizer in the config of a compiled model: both optimizers, and how the dense one's gradients travel.

What a file cannot say is refused when the model is saved, by name. Slots and steps are no part of a config: they are in
the file's variables and beside the file, with the rows.
"""
import sys
from typing import Any, Callable, Dict

from lightcc._keras import create_distributed_optimizer
from lightcc._keras.optimizer import is_distributed, keras_of
from lightcc.compress.compressors import Int4, Int8, NoneCompressor, TopK
from lightcc.core.process_sets import global_process_set
from lightcc.tensorflow.compression import BF16Compressor, FP16Compressor
from lightcc.tensorflow.embedding import SGD, Adagrad, GroupAdagrad, GroupAdam, LazyAdam, SparseAdam
from lightcc.tensorflow.embedding.optimizers import TableOptimizer

Config = Dict[str, Any]
PACKAGE, NAME = "lightcc", "Optimizer"  # by which Keras finds it in files
_SPARSE = {cls.__name__: cls for cls in (SGD, Adagrad, GroupAdagrad, GroupAdam, LazyAdam, SparseAdam)}
_CASTS = {"none": NoneCompressor, "fp16": FP16Compressor, "bf16": BF16Compressor}
_CODECS = {"topk": TopK, "int8": Int8, "int4": Int4}


def register(keras: Any, of_config: Callable[[Any, Config], Any]) -> None:
    """Has a Keras make of_config(keras, config) of the configs in its files."""
    class Optimizer:
        """What the config of an E.Optimizer names. No object of it is made."""

        get_config = None  # Keras registers no class without the name

        @classmethod
        def from_config(cls, config: Config) -> Any:
            return of_config(keras, config)

    keras.utils.register_keras_serializable(PACKAGE, NAME)(Optimizer)


def named_in_files(cls: type) -> type:
    """Has Keras write objects of a class of E.Optimizer as what register() makes."""
    cls.__name__ = cls.__qualname__ = NAME  # Keras 2 would take the dense optimizer's name for its own class
    registration = sys.modules[f"{keras_of(cls).__name__}.src.saving.object_registration"]
    names = getattr(registration, "GLOBAL_CUSTOM_NAMES", None)
    (registration._GLOBAL_CUSTOM_NAMES if names is None else names)[cls] = f"{PACKAGE}>{NAME}"  # the former of Keras 2
    return cls


def config_of(dense: Any, sparse: TableOptimizer) -> Config:
    """Both in a form that JSON takes. ValueError, which says what it is, for what has none."""
    keras = keras_of(type(dense))
    rate = dense._learning_rate
    if callable(rate) and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise _refused(f"the learning rate of dense, {rate!r}, which is no schedule of Keras")
    return {"dense": _serialized(keras, dense, "dense"), "sparse": _config_of_sparse(keras, sparse),
            "distributed": _config_of_distributed(dense) if is_distributed(dense) else None}


def dense_of(keras: Any, config: Config) -> Any:
    """Of what config_of returns."""
    dense, options = keras.utils.deserialize_keras_object(config["dense"]), config["distributed"]
    if options is None:
        return dense
    return create_distributed_optimizer(keras, dense, **{**options, "compression": _compression(options)})


def sparse_of(keras: Any, config: Config) -> TableOptimizer:
    """Of what config_of returns."""
    told = config["sparse"]
    options = dict(told["config"])
    rate = options["learning_rate"] = keras.utils.deserialize_keras_object(options["learning_rate"])
    sparse = _SPARSE[told["class_name"]](**options)
    if not callable(rate):
        sparse.learning_rate = told["present_rate"]
    return sparse


def _config_of_sparse(keras: Any, sparse: TableOptimizer) -> Config:
    kind = type(sparse)
    if _SPARSE.get(kind.__name__) is not kind:
        raise _refused(f"sparse={sparse!r} of a class of your own")
    options, rate = sparse.get_config(), sparse.schedule
    if rate is not None and not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        raise _refused(f"the learning rate of sparse, {rate!r}, which is no schedule of Keras")
    if rate is not None:
        options["learning_rate"] = _serialized(keras, rate, "the learning rate of sparse")
    return {"class_name": kind.__name__, "config": options,
            "present_rate": None if rate is not None else float(sparse.learning_rate.numpy())}


def _serialized(keras: Any, thing: Any, what: str) -> Config:
    try:
        return keras.utils.serialize_keras_object(thing)
    except NotImplementedError as error:
        raise _refused(f"{what}, {thing!r}, which has no get_config") from error


def _config_of_distributed(dense: Any) -> Config:
    options = dense._distribution._asdict()
    if options.pop("process_set") is not global_process_set:
        raise _refused("the process_set of dense")
    if isinstance(options["groups"], list):
        raise _refused("the groups of dense, which are lists of variables")
    if dense._reducer.has_local:
        raise _refused("the local layers or variables of dense")
    options["compression"] = _config_of_compression(options["compression"])
    return options


def _config_of_compression(compression: Any) -> Any:
    for name, cls in _CASTS.items():
        if compression is cls:
            return name
    for name, cls in _CODECS.items():
        if type(compression) is cls and compression == cls(**compression.options()) and compression.dense is None:
            return {name: compression.options()}
    raise _refused(f"the compression of dense, {compression!r}")


def _compression(options: Config) -> Any:
    told = options["compression"]
    if isinstance(told, str):
        return _CASTS[told]
    (name, arguments), = told.items()
    return _CODECS[name](**arguments)


def _refused(what: str) -> ValueError:
    return ValueError(f"E.Optimizer: a file cannot say {what}. Save to .weights.h5 and compile the model as before, or "
                      "leave it out.")
