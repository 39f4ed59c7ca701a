"""What the machine's memory allows: driver/floor.c, in the form of a peer."""
import os
from typing import List

from peers.peer import Job, Peer, Setting, Start, one_process_a_rank, plain_environment


class Floor(Peer):
    name = "floor"
    transport = "memory that all ranks map"
    memories = ("shared",)
    ways = ("each",)

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        mib = 2 * job.most_bytes // 2**20 + 16  # input and output, each rounded up to a huge page
        memory = os.memfd_create("floor", 0)
        os.truncate(memory, (mib * job.ranks + 2) << 20)
        environment = plain_environment(BENCH_FLOOR_FD=str(memory), BENCH_FLOOR_MIB=str(mib),
                                        BENCH_YIELD=str(int(job.shared_cores)))
        return one_process_a_rank(job, [*job.driver, "floor"], environment, (memory,))


PEER = Floor()
