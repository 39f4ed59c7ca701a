"""Hugging Face's Accelerate, and the Trainer of Transformers, over lightcc.

    import lightcc.torch.accelerate
    lightcc.torch.accelerate.init()    # before Accelerator(cpu=True) or TrainingArguments(use_cpu=True)

Both know a list of backends, in which lightcc is not; but a process group that is there already they take as it is.
"""
import re
from datetime import timedelta
from importlib import metadata
from typing import Any, Optional

import torch.distributed as dist

import lightcc.torch.process_group  # noqa: F401  the backend "lightcc"
from lightcc.torch.asked_backend import is_lightcc

__all__ = ["init"]

OLDEST, NEWEST = (1, 0), "1.15"


def init(timeout: Optional[timedelta] = None, **where: Any) -> None:
    """Makes torch.distributed's process group over lightcc; does nothing if it is there.

    timeout, where: as for torch.distributed.init_process_group, such as init_method, rank and world_size where no
    launcher says them. Under `accelerate launch`, torchrun, lightccrun and mpirun nothing is to be said.

    Errors: RuntimeError if there is a process group of another backend, which Accelerator() and TrainingArguments()
    make. ImportError for an Accelerate before 1.0, which would make its own. Those of init_process_group.

    >>> init()  # doctest: +SKIP
    >>> accelerator = accelerate.Accelerator(cpu=True)  # doctest: +SKIP
    """
    _check_version(metadata.version("accelerate"))
    if not dist.is_initialized():
        dist.init_process_group("lightcc", **({} if timeout is None else {"timeout": timeout}), **where)
    elif not is_lightcc(dist.get_backend()):
        raise RuntimeError(f"lightcc.torch.accelerate.init(): there is a process group of backend "
                           f"'{dist.get_backend()}' already. Call init() before Accelerator() and TrainingArguments(), "
                           "which make one.")


def _check_version(version: str) -> None:
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise ImportError(f"lightcc.torch.accelerate: Accelerate {version} makes a process group of its own; "
                          f"{'.'.join(map(str, OLDEST))} to {NEWEST} were tested: pip install -U accelerate")
