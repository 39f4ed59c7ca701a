"""What a module says of a name that it does not have."""


def no_attribute(module: str, name: str) -> AttributeError:
    """For a module's __getattr__; of what Horovod has and a later version will have, it says so."""
    later = (f" in this version; {module.replace('lightcc', 'horovod', 1)} has it, and README.md lists what is not "
             "supported yet")
    return AttributeError(f"module {module!r} has no attribute {name!r}{later if name in _LATER else ''}")


_LATER = frozenset(["elastic"])
