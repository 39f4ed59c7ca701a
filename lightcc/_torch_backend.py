"""Tells torch.distributed that there is a backend "lightcc". torch itself calls register() when it is imported, if
lightcc is installed (entry point torch.backends); importing lightcc.torch.process_group does the same.

This must cost nothing and cannot fail: whoever imports torch comes by here, and so lightcc's library is not loaded
before a process group is made. No framework is imported here: torch is there already.
"""
import os
import sys

_LAUNCHERS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def register() -> None:
    """Makes torch.distributed.init_process_group("lightcc") work. A second call does nothing."""
    dist = sys.modules["torch"].distributed
    if not dist.is_available() or hasattr(dist.Backend, "LIGHTCC"):
        return
    dist.Backend.register_backend("lightcc", _make, extended_api=True, devices=["cpu"])
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:  # else torch's own stays: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set
        handlers["env"] = _env_or_launcher(handlers["env"])


def _make(options, _):
    from lightcc.torch import process_group
    return process_group.make(options)


def _env_or_launcher(env_rendezvous):
    """env://, init_process_group's default, also where a launcher has set other variables than torch expects: then the
    ranks meet through lightcc. Whatever torch can do by itself is left to it."""
    def handler(url, *args, **kwargs):
        if "RANK" in os.environ or "rank=" in url or not any(name in os.environ for name in _LAUNCHERS):
            return env_rendezvous(url, *args, **kwargs)
        from lightcc.torch import process_group
        return process_group.rendezvous(*args, **kwargs)
    return handler
