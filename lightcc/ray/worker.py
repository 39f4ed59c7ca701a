"""The actor that is a rank. Its executable is an object of the user's class, which lives as long as the actor."""
import os
import socket
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import ray

from lightcc.core.job import is_initialized, shutdown
from lightcc.launch import placed
from lightcc.ray import ray_logger


class Whereabouts(NamedTuple):
    node: str  # Ray's id
    host: str
    gpus: List[int]


class BaseHorovodWorker:
    """One rank. Source: horovod.ray.BaseHorovodWorker."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.world_rank, self.world_size = world_rank, world_size

    def hostname(self) -> str:
        return socket.gethostname()

    def node_id(self) -> str:
        """Ray's."""
        return ray.get_runtime_context().get_node_id()

    def get_gpu_ids(self) -> List[int]:
        """Those that Ray has given to this actor."""
        return ray.get_gpu_ids()

    def update_env_vars(self, env_vars: Dict[str, Any]) -> None:
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> Dict[str, str]:
        return dict(os.environ)

    def start_executable(self, executable_cls: Optional[Callable[..., Any]] = None, executable_args: Any = None,
                         executable_kwargs: Optional[Dict[str, Any]] = None) -> None:
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """func(self.executable). If it raises, this rank leaves the job, so that no other one waits for it."""
        try:
            return func(self.executable)
        except BaseException:
            shutdown()  # it tells the others what is being raised
            raise

    def call(self, call: Tuple[Callable[..., Any], Sequence[Any], Dict[str, Any]]) -> Any:
        """The same for func, args, kwargs, without the executable."""
        func, args, kwargs = call
        return self.execute(lambda _: func(*args, **kwargs))

    # How the workers meet; RayExecutor carries what they say.

    def whereabouts(self) -> Whereabouts:
        return Whereabouts(self.node_id(), self.hostname(), self.get_gpu_ids())

    def here(self, leave: bool) -> Tuple[placed.Process, bool]:
        """And whether it is in a world. leave: it leaves it first."""
        if leave:
            shutdown()
        return placed.here(), is_initialized()

    def open_meeting(self, *here: Tuple[placed.Process, bool]) -> Optional[placed.Meeting]:
        """On rank 0. None if all are in a world."""
        return None if all(inside for _, inside in here) else placed.open_meeting()

    def place(self, rank: int, meeting: Optional[placed.Meeting], *here: Tuple[placed.Process, bool]) -> None:
        self.world_rank, self.world_size = rank, len(here)
        if meeting is not None:
            shutdown()  # if it is in a world, then without some of the others
            placed.place(rank, [process for process, _ in here], meeting)

    def log_to(self, channel: Any) -> None:
        ray_logger.configure(channel)
