"""Models with distributed optimizers in files: a file names the plain class, so that Keras alone can read it."""
import sys
from typing import Any, Callable

from lightcc._keras.optimizer import is_distributed

_TENSORFLOWS_NAMES = ("_keras_api_names", "_keras_api_names_v1")  # where Keras 2 keeps the public names of a class


def name_like(cls: type, plain: type) -> None:
    """Makes Keras save objects of cls, a subclass, as those of a plain class."""
    for package in ("keras", "tf_keras"):
        exported = sys.modules.get(f"{package}.src.api_export")
        public = getattr(exported, "REGISTERED_OBJS_TO_NAMES", {})
        own = next((base for base in plain.__mro__ if not base.__module__.startswith("keras.src.backend.")), plain)
        if own in public:  # on torch, Keras makes an object of SGD's subclass and saves a name that only torch knows
            public[cls] = public[own]
        registration = sys.modules.get(f"{package}.src.saving.object_registration")
        for table in ("GLOBAL_CUSTOM_NAMES", "_GLOBAL_CUSTOM_NAMES"):
            custom = getattr(registration, table, {})
            if plain in custom:
                custom[cls] = custom[plain]
    for attribute in _TENSORFLOWS_NAMES:
        if attribute in vars(plain):
            setattr(cls, attribute, vars(plain)[attribute])


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
        wrap_optimizer(optimizer)
        model.jit_compile = False  # as model.compile would have it: see hooks.py
        model.train_function = None
    return model
