"""lightcc through its C API."""
import importlib.util
import os
import uuid
from pathlib import Path
from typing import List

from peers.peer import Job, Peer, Setting, Start, Unavailable, one_process_a_rank, plain_environment


class Lightcc(Peer):
    name = "lightcc"
    transport = "shared memory; the check that ranks agree is on, as always"
    memories = ("private", "shared")
    ways = ("async",)

    def core(self) -> Path:
        if os.environ.get("LIGHTCC_LIBRARY"):
            return Path(os.environ["LIGHTCC_LIBRARY"]).resolve()
        package = importlib.util.find_spec("lightcc")
        if not package:
            raise Unavailable("the package lightcc is not installed, and LIGHTCC_LIBRARY is not set")
        return Path(package.origin).parent / "_lightcc.so"

    def find(self) -> None:
        if not self.core().exists():
            raise Unavailable(f"{self.core()} is not there: install lightcc, or set LIGHTCC_LIBRARY")

    def starts(self, job: Job, setting: Setting) -> List[Start]:
        chosen = {name: value for name, value in os.environ.items() if name.startswith("LIGHTCC_")}
        environment = plain_environment(**{**chosen, "LIGHTCC_JOB_ID": uuid.uuid4().hex})
        return one_process_a_rank(job, [*job.driver, "lightcc", str(self.core())], environment)


PEER = Lightcc()
