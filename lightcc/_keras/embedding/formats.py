"""Ways to write a Keras model that have no place for the rows of its tables: each is refused, and says what to use."""
import importlib
from typing import Any, Callable

from lightcc._keras.embedding.saving import package_of, tables_of, wrap_function
from lightcc._keras.patches import wrap

_Around = Callable[[Callable[..., Any]], Callable[..., Any]]
_KERAS3 = [("legacy.saving.legacy_h5_format", "save_model_to_hdf5"),
           ("legacy.saving.legacy_h5_format", "save_weights_to_hdf5_group")]
_KERAS2 = [("saving.legacy.hdf5_format", "save_model_to_hdf5"),
           ("saving.legacy.hdf5_format", "save_weights_to_hdf5_group"), ("saving.legacy.saved_model.save", "save")]
_FILE = "Save to a file that ends in .keras or .weights.h5"


def install(keras: Any) -> None:
    """Wraps them, once for each Keras."""
    legacy = _without_rows(f"this format of Keras has no place for its rows. {_FILE}.")
    for module, name in _KERAS3 if hasattr(keras, "ops") else _KERAS2:
        wrap_function(importlib.import_module(f"{package_of(keras)}.src.{module}"), name, legacy)
    archive = type(getattr(getattr(keras, "export", None), "ExportArchive", object)())  # in Keras 3 another class
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", object)
    for cls, name, around in ((keras.Model, "export", _export), (archive, "track", _export),
                              (keras.Model, "get_state_tree", _state_tree)):
        if hasattr(cls, name):
            wrap(cls, name, around)
    if "set_model" in vars(orbax):  # else the state tree, which it saves, is refused
        wrap(orbax, "set_model", _orbax)


def _without_rows(why: str) -> _Around:
    """For what gets the model as one of its arguments."""
    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **options: Any) -> Any:
            for tables in map(tables_of, (*args, *options.values())):
                if tables:
                    raise ValueError(f"table {tables[0].name!r}: {why}")
            return plain(*args, **options)
        return write
    return around


_export = _without_rows("an export of Keras would be without its rows. Call E.freeze(model, ids, path) or "
                        "E.split(model, path), whose SavedModels need no lightcc.")
_state_tree = _without_rows("a state tree, as OrbaxCheckpoint saves it, has no place for its rows. " + _FILE + ", by "
                            "keras.callbacks.ModelCheckpoint, say; lightcc.embedding.export gives rows as arrays.")
_orbax = _without_rows("OrbaxCheckpoint would save the model without its rows. Use keras.callbacks.ModelCheckpoint "
                       "with a file that ends in .keras or .weights.h5, or BackupAndRestore, on all ranks.")
