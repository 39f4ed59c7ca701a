"""Tells torch.distributed that there is a backend "lightcc". torch itself calls register() when it is imported, if
lightcc is installed (entry point torch.backends); importing lightcc.torch.process_group does the same.

This must cost nothing and cannot fail: whoever imports torch comes by here, and so lightcc's library is not loaded
before a process group is made. No framework is imported here: torch is there already.
"""
import os
import sys

LAUNCHERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def register() -> None:
    """Makes torch.distributed.init_process_group("lightcc") work. A second call does nothing."""
    dist = sys.modules["torch"].distributed
    if not dist.is_available() or hasattr(dist.Backend, "LIGHTCC"):
        return
    dist.Backend.register_backend("lightcc", _make, extended_api=True, devices=["cpu", "cuda"])
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:  # else torch's own stays: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set
        handlers["env"] = _env_or_launcher(handlers["env"])


def _make(options, _):
    from lightcc.torch import process_group
    return process_group.make(options)


def _env_or_launcher(env_rendezvous):
    """env://, init_process_group's default, also where a launcher has set other variables than torch expects: then the
    ranks meet through lightcc. Whatever torch can do by itself is left to it."""
    used = False

    def handler(url, *args, **kwargs):
        nonlocal used
        used_before, used = used, True
        by_torch = "RANK" in os.environ and not (_set_by_lightccrun() and (used_before or _initialized()))
        if by_torch or "rank=" in url or not any(name in os.environ for name in LAUNCHERS):
            return env_rendezvous(url, *args, **kwargs)
        from lightcc.torch import process_group
        return process_group.rendezvous(*args, **kwargs)
    return handler


def _set_by_lightccrun() -> bool:
    """Whether RANK and WORLD_SIZE are as lightccrun has set them. They hold for the whole job, of which lightcc's world
    may be a part; and a second store of torch at MASTER_PORT meets ranks that still use the first."""
    return "LIGHTCC_JOB_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ and all(
        os.environ.get(torchs) == os.environ.get(ours)
        for torchs, ours in (("RANK", "HOROVOD_RANK"), ("WORLD_SIZE", "HOROVOD_SIZE")))


def _initialized() -> bool:
    core = sys.modules.get("lightcc.core.lib")
    return core is not None and core.initialized()
