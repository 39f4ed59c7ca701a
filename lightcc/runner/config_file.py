"""--config-file: settings from YAML, in sections as horovodrun has them. Its keys are those of flags.SETTINGS."""

from typing import Any, NamedTuple, Optional

from lightcc.runner.flags import SETTINGS

CONTROLLERS = ("gloo", "mpi")


class Settings(NamedTuple):
    variables: dict[str, str]
    controller: Optional[str] = None


def load(path: str) -> Settings:
    """Raises ValueError with file, key and what is expected there; OSError if the file cannot be read."""
    try:
        import yaml  # here, so that only those pay for it who use it
    except ImportError as error:
        raise ValueError(f"--config-file {path} needs PyYAML ({error}); pip install PyYAML") from None

    try:
        with open(path, "rb") as file:
            return read(yaml.safe_load(file), path)
    except OSError as error:
        raise type(error)(f"--config-file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: this is no YAML: {' '.join(str(error).split())}") from None


def read(content: Any, path: str) -> Settings:
    """The settings in a file's content. A key without a value is as if it were not there."""
    known = {setting.key: setting for setting in SETTINGS if setting.key}
    variables, controller = {}, None
    for section, entries in _entries(content, path, "", ["controller", *dict.fromkeys(k.split(".")[0] for k in known)]):
        if section == "controller":
            if entries is not None and entries not in CONTROLLERS:
                raise _wrong(path, section, entries, " or ".join(CONTROLLERS))
            controller = entries
            continue
        names = [key.split(".")[1] for key in known if key.startswith(f"{section}.")]
        for name, value in _entries(entries, path, section, names):
            setting = known[f"{section}.{name}"]
            if value is None:
                continue
            try:
                variables[setting.variable] = setting.text_of(value)
            except ValueError:
                raise _wrong(path, setting.key, value, setting.expected) from None
    return Settings(variables, controller)


def _entries(content: Any, path: str, section: str, names: list[str]) -> list[tuple[str, Any]]:
    """The entries of a section, or of the file if `section` is empty; each has one of these names."""
    if content is None:
        return []
    if not isinstance(content, dict):
        raise _wrong(path, section, content, f"a mapping with the keys {', '.join(names)}")
    for name in content:
        if name not in names:
            place = f"{section} has" if section else "there are"
            raise ValueError(f"{path}: unknown key '{section}{'.' * bool(section)}{name}'; {place} {', '.join(names)}")
    return list(content.items())


def _wrong(path: str, key: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{path}: {key + ' is' if key else 'it holds'} {value!r}; expected {expected}")
