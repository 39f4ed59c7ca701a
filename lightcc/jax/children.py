"""What a rank starts is none, though it inherits what the launcher has said: a process that multiprocessing spawns, for
one, imports the program again, and with it lightcc.jax.

A rank that the launcher has placed leaves its place in the environment, by which its children know. Where they are
ranks of another job, which a launcher inside this one has begun, they have another place.
"""
import os

MARK = "LIGHTCC_JAX"  # "1" is lightccrun's (lightcc/launch/jax_programs.py)
RANKS = ("HOROVOD_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")  # launchers set them
KUBEFLOW = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")  # of its JAXJob
_JOBS = ("LIGHTCC_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")


def mark() -> None:
    """This process is a rank."""
    os.environ[MARK] = f"{os.getpid()} {_place()}"


def is_of_rank() -> bool:
    """Whether a rank has started this process, or one between them. A rank that has put another program in its own
    place (exec) is not its child."""
    rank, _, place = os.environ.get(MARK, "").partition(" ")
    return place == _place() and rank != str(os.getpid())


def _place() -> str:
    return ",".join(f"{name}={os.environ.get(name, '')}" for name in (*_JOBS, *RANKS, *KUBEFLOW))
