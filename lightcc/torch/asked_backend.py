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
    ValueError if it would be lightcc's for one kind of device and another's for the rest, or for one that lightcc does
    not know.

    >>> is_lightcc("lightcc"), is_lightcc("cpu:lightcc,cuda:lightcc"), is_lightcc("cpu:gloo,cuda:nccl")
    (True, True, False)
    """
    if backend is None:
        return True
    of_devices = [text.strip().rpartition(":") for text in backend.split(",")]
    others = [name for _, _, name in of_devices if name != "lightcc"]
    if len(others) == len(of_devices):
        return False
    if others:
        raise ValueError(f"A process group of backend '{backend}': lightcc shares no group with another backend. Make "
                         "a group of backend 'lightcc', which takes tensors of the CPU and of CUDA GPUs, and with "
                         f"torch.distributed.new_group(backend='{others[0]}') one for the other tensors.")
    unknown = [device for device, _, _ in of_devices if device not in ("", "cpu", "cuda")]
    if unknown:
        raise ValueError(f"A process group of backend '{backend}': lightcc takes tensors of the CPU and of CUDA GPUs, "
                         f"not of {unknown[0]}.")
    return True
