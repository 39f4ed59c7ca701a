"""Arguments that run() and run_elastic() share."""
import os
from collections.abc import Mapping, Sequence
from typing import Dict, Optional, Union

_DEFAULT_S = 600


def settings_of(env: Optional[Mapping[str, str]], nics: Union[str, Sequence[str], None]) -> Dict[str, str]:
    """Variables of the ranks."""
    found = {str(name): str(value) for name, value in (env or {}).items()}
    if nics:
        found["LIGHTCC_IFACE"] = "=" + (nics if isinstance(nics, str) else ",".join(nics))
    return found


def seconds_of(argument: Optional[float], variable: str) -> float:
    """The argument, else the variable, else 600."""
    if argument is not None:
        return float(argument)
    text = os.environ.get(variable) or str(_DEFAULT_S)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{variable}={text}: expected seconds") from None
