"""The error for a name that a module does not have."""


def no_attribute(module: str, name: str) -> AttributeError:
    """For a module's __getattr__. The text says which names Horovod has and lightcc does not have yet."""
    hint = (f" in this version; {module.replace('lightcc', 'horovod', 1)} has it, and README.md lists what is not "
            "supported yet")
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint if name in _UNSUPPORTED else ''}")


_UNSUPPORTED = frozenset(["elastic"])
