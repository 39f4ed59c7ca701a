"""Models with distributed optimizers in files: a file names the plain class, so that Keras alone can read it."""
import sys
from typing import Any, Callable

from lightcc._keras.optimizer import Keras3, is_distributed, keras_of, members_for

_TENSORFLOWS_NAMES = ("_keras_api_names", "_keras_api_names_v1")  # where Keras 2 keeps the public names of a class


def name_like(cls: type, plain: type) -> None:
    """Makes Keras save objects of cls, a subclass, as those of a plain class."""
    if members_for(plain) is Keras3:
        public = sys.modules["keras.src.api_export"].REGISTERED_OBJS_TO_NAMES
        # On torch, Keras makes an object of a subclass of SGD, whose name says nothing elsewhere.
        exported = next(base for base in plain.__mro__ if not base.__module__.startswith("keras.src.backend."))
        if exported in public:
            public[cls] = public[exported]
        elif _is_keras(plain):
            public[cls] = _path(plain)
    else:
        for attribute in _TENSORFLOWS_NAMES:
            if attribute in vars(plain):
                setattr(cls, attribute, vars(plain)[attribute])
            elif _is_keras(plain):
                setattr(cls, attribute, (_path(plain),))
    registration = sys.modules[f"{keras_of(plain).__name__}.src.saving.object_registration"]
    registered = getattr(registration, "GLOBAL_CUSTOM_NAMES", None)
    registered = registration._GLOBAL_CUSTOM_NAMES if registered is None else registered  # of Keras 2
    if plain in registered:
        registered[cls] = registered[plain]


def _is_keras(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("keras", "tf_keras")


def _path(cls: type) -> str:
    """Where Keras finds a class of its own that has no public name."""
    return f"{cls.__module__}.{cls.__name__}"


def load_model(keras, wrap_optimizer: Callable[[Any], Any], filepath, custom_optimizers, custom_objects,
               legacy_opts=False):
    """Loads a model with Keras and makes its optimizer, with its state, distributed by wrap_optimizer(optimizer).

    keras: the package. The other arguments and errors: lightcc.keras.load_model.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not is_distributed(optimizer):
        if _is_misbuilt(optimizer):
            with keras.utils.custom_object_scope(objects):
                optimizer = type(optimizer).from_config(optimizer.get_config())
        model.optimizer = wrap_optimizer(optimizer)
        model.jit_compile = False  # as model.compile would have it: see patches.py
        model.train_function = None
    return model


def _is_misbuilt(optimizer) -> bool:
    """Reading .h5, Keras 3 builds an optimizer for no variables, which cannot train any then."""
    return members_for(type(optimizer)) is Keras3 and optimizer.built and not optimizer._trainable_variables
