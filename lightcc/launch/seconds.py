"""Times that a user gives: as an argument, a flag's text or an environment variable."""
import os
from typing import Any


def seconds(value: Any) -> float:
    """ValueError if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number < float("inf"):
        raise ValueError(f"'{value}' is not a number of seconds, 0 or more")
    return number


def from_environment(variable: str, default: float) -> float:
    """The variable's, if it is set. ValueError, which names it, if that is no time."""
    text = os.environ.get(variable) or default
    try:
        return seconds(text)
    except ValueError:
        raise ValueError(f"{variable}={text}: expected seconds, 0 or more") from None
