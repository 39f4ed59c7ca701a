"""Which backend torch was asked for when it makes a group.

torch tells it neither to the maker of a backend nor, as of 2.13, to the default group's new_group, which it calls for
groups of every backend. Its own functions have it in a variable, which is read here.
"""
import sys
from types import FrameType
from typing import Optional

_TORCH = "torch.distributed.distributed_c10d"
_FUNCTIONS = ("_new_group_with_tag", "_new_process_group_helper")  # their argument `backend` is what the user gave


def asked_backend() -> Optional[str]:
    """For example "lightcc" or "cpu:gloo,cuda:nccl"; None if torch is not making a group right now."""
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _TORCH:
            return str(frame.f_locals["backend"]).lower()
        frame = frame.f_back
    return None


def is_lightcc(backend: Optional[str]) -> bool:
    """Whether a group of this backend is lightcc's; None: it was not torch that asked for it, but who has the group.
    ValueError if it would be lightcc's for one kind of device and another's for the rest.

    >>> is_lightcc("lightcc"), is_lightcc("cpu:lightcc"), is_lightcc("cpu:gloo,cuda:nccl")
    (True, True, False)
    """
    if backend is None or backend in ("lightcc", "cpu:lightcc"):
        return True
    of_devices = backend.split(",")
    others = [text for text in of_devices if text.rpartition(":")[2] != "lightcc"]
    if len(others) == len(of_devices):
        return False
    other = others[0].rpartition(":")[2] if others else "nccl"
    raise ValueError(f"A process group of backend '{backend}': lightcc takes CPU tensors only in this version, and "
                     "shares no group with another backend. Make a group of backend 'lightcc', and with "
                     f"torch.distributed.new_group(backend='{other}') one for the other devices' tensors.")
