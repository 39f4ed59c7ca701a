"""What a rank does that some launcher has started on some host: each_rank.py WHAT FOLDER. What it saw it leaves in
FOLDER/RANK.json, since launchers mix the outputs of ranks. Hosts are emulated: they share files and the clock."""
import importlib.util
import json
import os
import signal
import socket
import sys
import time

import numpy as np

import lightcc.numpy as hvd
from lightcc.core.exceptions import HorovodInternalError

seen = {}


def number(what, *others):
    """What the launcher says of this process, whatever world lightcc makes of it."""
    names = [*(name.format(what) for name in ("OMPI_COMM_WORLD_{}", "PMI_{}", "HOROVOD_{}")), *others]
    return int(next(os.environ[name] for name in names if name in os.environ))


def save(**more):
    seen.update(more)
    path = os.path.join(sys.argv[2], f"{me}.json")
    with open(path + ".new", "w") as out:
        json.dump(seen, out)
    os.rename(path + ".new", path)


def total(process_set=hvd.global_process_set):
    """A digit for each launched rank that is in the set."""
    return float(hvd.allreduce(np.full(1000, 10.0 ** me), op=hvd.Sum, name="total", process_set=process_set)[-1])


def numbers_and_total():
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()], total()


def world(comm=None):
    hvd.init(comm)
    try:
        assert hvd.global_process_set.mpi_comm is (comm if hasattr(comm, "Get_size") else None)
        return numbers_and_total()
    finally:
        hvd.shutdown()


def tour():
    """Worlds one after the other; at last one rank dies."""
    save(host=socket.gethostname(), mpi4py=importlib.util.find_spec("mpi4py") is not None,
         mpi=hvd.mpi_enabled(), first=world(), again=world(), part=world(list(range(me % 2, size, 2))))
    if hvd.mpi_enabled():  # others have rank 0 listen where they know from the start, on the first host
        save(turned=world(list(range(size))[::-1]))
    see_a_death()


def see_a_death():
    for signum in (signal.SIGTERM, signal.SIGUSR1):  # launchers end the other ranks as well, which want to tell first
        signal.signal(signum, signal.SIG_IGN)
    hvd.init()
    try:
        total()
        if me == size - 1:
            save(death=time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            total()
    except HorovodInternalError as error:
        save(heard=time.monotonic(), error=str(error))
        sys.exit(1)


def by_mpi4py():
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    whole = world(comm)
    part = world(comm.Split(comm.rank % 2, -comm.rank))
    save(library=MPI.Get_library_version(), whole=whole, part=part, alone=world(MPI.COMM_SELF), again=world(comm),
         without=world(), mpi=comm.allreduce(10.0 ** me), half=process_set(comm.Split(comm.rank % 2)))


def process_set(comm):
    """Of a communicator that is another one on other ranks."""
    half = hvd.ProcessSet(comm)
    hvd.init(process_sets=[half])
    try:
        return half.process_set_id, half.ranks, total(half)
    finally:
        hvd.shutdown()


def two():
    """A world of the first and the last rank, while the others do without lightcc."""
    if me in (0, size - 1):
        save(world=world([0, size - 1]))


if __name__ == "__main__":
    me, size = number("RANK", "RANK", "SLURM_PROCID"), number("SIZE", "WORLD_SIZE", "SLURM_NTASKS")
    {"tour": tour, "by_mpi4py": by_mpi4py, "two": two}[sys.argv[1]]()
