"""Which implementation of collectives JAX's CPU backend takes. jaxlib knows two, gloo and mpi, and fills the functions
of mpi from the library that MPITRAMPOLINE_LIB names (MPItrampoline's ABI); ours is such a library, csrc/api/mpiabi.
"""
import os
import sys

from lightcc.core import lib

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "liblightcc_jax.so")
CHOICE, NAMED = "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "MPITRAMPOLINE_LIB"
OLDEST = "0.4.38"  # the oldest jaxlib whose table of MPI's functions is known


def choose() -> bool:
    """Has JAX's CPU backend take lightcc. False: the user has chosen another, which stays.

    Errors: RuntimeError if jaxlib has filled its table, which it does when it is loaded, or if the backend exists;
    ImportError if this jaxlib cannot.
    """
    chosen, other = os.environ.get(CHOICE, "mpi"), os.environ.get(NAMED, LIBRARY)
    if chosen != "mpi" or other != LIBRARY:
        lib.log(lib.WARNING, f"{CHOICE}={chosen}: JAX's collectives do not run over lightcc" if chosen != "mpi" else
                f"{NAMED}={other}: JAX's collectives run over that MPI, and not over lightcc")
        return False
    if "jaxlib" in sys.modules and NAMED not in os.environ:
        raise RuntimeError("import lightcc.jax comes too late: jax is there already, and looks for its collectives "
                           "when it is imported. Move it before `import jax`, or start with lightccrun --jax, or with "
                           f"{NAMED}={LIBRARY} in the environment.")
    os.environ[NAMED] = LIBRARY
    import jax
    import jaxlib
    check_too_late("import lightcc.jax")
    if not _has_mpi():
        raise ImportError(f"lightcc.jax needs a jaxlib with the collectives 'mpi', as those from {OLDEST} on have for "
                          f"Linux; this is jaxlib {jaxlib.__version__} with jax {jax.__version__}. pip install -U jax")
    jax.config.update("jax_cpu_collectives_implementation", "mpi")
    return True


def check_too_late(call: str) -> None:
    """RuntimeError if JAX has begun to compute: its CPU backend does not change any more."""
    from jax._src import xla_bridge
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(f"{call} comes too late: JAX has its devices already, and they do not know of each other. "
                           "Move it before the first array, jit or jax.devices(), best right behind `import jax`.")


def check_devices() -> None:
    """ValueError if this process is to have several CPU devices: jaxlib's mpi collectives know one a process."""
    asked = [flag for flag in os.environ.get("XLA_FLAGS", "").split()
             if flag.startswith("--xla_force_host_platform_device_count=") and not flag.endswith("=1")]
    import jax
    number = getattr(jax.config, "jax_num_cpu_devices", -1)
    if number > 1:
        asked.append(f"jax_num_cpu_devices={number}")
    if asked:
        raise ValueError(f"{asked[0]}: over lightcc a process has one CPU device, since jaxlib's mpi collectives know "
                         "no more. Start as many processes as you want devices: lightccrun -np N")


def _has_mpi() -> bool:
    import jaxlib
    from jax._src.lib import xla_client
    module = getattr(xla_client, "_xla", None)
    if module is None or not hasattr(module, "make_mpi_collectives"):
        module = getattr(jaxlib, "_jax", None)
    return hasattr(module, "make_mpi_collectives")
