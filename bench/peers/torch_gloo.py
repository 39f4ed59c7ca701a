"""torch.distributed's gloo, called from Python: that is how it is reached, and it takes far longer than Python does."""
import importlib.util
import sys
from pathlib import Path
from typing import List

from peers.peer import Job, Peer, Setting, Start, Unavailable, one_process_a_rank, plain_environment

PROGRAM = Path(__file__).resolve().parents[1] / "driver" / "driver.py"


class Gloo(Peer):
    name = "gloo"
    transport = "TCP over lo, called from Python; in place"
    places = ("in",)

    def find(self) -> None:
        if not importlib.util.find_spec("torch"):
            raise Unavailable("torch is not installed here")

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        return one_process_a_rank(job, [sys.executable, str(PROGRAM), *job.driver[1:], "gloo"], plain_environment())


PEER = Gloo()
