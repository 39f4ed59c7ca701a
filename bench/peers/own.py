"""lightcc in the form of a peer. Sums, as the peers do."""
import torch

import lightcc
import lightcc.torch as hvd

NAME = "lightcc"
VERSION = f"lightcc {lightcc.__version__}"


def allreduce(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce(tensor, op=hvd.Sum)


def allreduce_in_place(tensor: torch.Tensor) -> torch.Tensor:
    return hvd.allreduce_(tensor, op=hvd.Sum)


def start(tensor: torch.Tensor) -> int:
    return hvd.allreduce_async_(tensor, op=hvd.Sum)


def finish(handle: int) -> None:
    hvd.synchronize(handle)
