"""Arguments that run() and run_elastic() share."""
from collections.abc import Mapping, Sequence
from typing import Dict, Optional, Union

from lightcc.launch.seconds import from_environment, seconds

_DEFAULT_S = 600


def settings_of(env: Optional[Mapping[str, str]], nics: Union[str, Sequence[str], None]) -> Dict[str, str]:
    """Variables of the ranks."""
    found = {str(name): str(value) for name, value in (env or {}).items()}
    if nics:
        found["LIGHTCC_IFACE"] = "=" + (nics if isinstance(nics, str) else ",".join(nics))
    return found


def seconds_of(argument: Optional[float], variable: str) -> float:
    """The argument, else the variable, else 600."""
    return from_environment(variable, _DEFAULT_S) if argument is None else seconds(argument)
