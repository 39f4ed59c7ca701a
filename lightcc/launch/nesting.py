"""A launcher that each rank of another one starts: there are as many jobs as ranks, and none knows the others."""

from collections.abc import Mapping

# What marks a rank of each, its rank, its size. A Slurm allocation has SLURM_PROCID in its batch script too, a step has
# a number.
_LAUNCHERS = (
    ("lightccrun", "LIGHTCC_JOB_ID", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
_FIRST_SPECIAL_STEP = 0xfffffff0  # from there on steps are Slurm's own, as that of a batch script


def remark(environment: Mapping[str, str]) -> str:
    """What to tell the user, on the first of several ranks of another launcher; else "".

    >>> remark({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})[:44]
    'this is rank 0 of 2 that mpirun has started,'
    """
    for name, mark, rank, size in _LAUNCHERS:
        texts = [environment.get(variable, "") for variable in (mark, rank, size)]
        if not (texts[0] and texts[1].isdecimal() and texts[2].isdecimal()):
            continue
        if name == "srun" and not (texts[0].isdecimal() and int(texts[0]) < _FIRST_SPECIAL_STEP):
            continue
        if int(texts[1]) == 0 and int(texts[2]) > 1:
            return (f"this is rank 0 of {texts[2]} that {name} has started, and each of them starts a job of its own, "
                    f"which knows nothing of the others; if all are to train together, leave one of the launchers out")
    return ""
