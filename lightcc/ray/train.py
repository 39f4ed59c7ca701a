"""Ray Train: a trainer whose workers are the ranks of a lightcc job. Ray Train refuses its own HorovodTrainer; this one
takes its arguments."""
import os
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Sequence, Union

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

from lightcc.core.job import shutdown
from lightcc.launch import placed

try:
    from ray.train.v2._internal.constants import is_v2_enabled
except ModuleNotFoundError:  # an older Ray
    _is_v2 = False
else:
    _is_v2 = is_v2_enabled()
if _is_v2:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
else:
    from ray.train.data_parallel_trainer import DataParallelTrainer

_LEAVE_S = 5.0  # which workers get to leave the job; then Ray ends them


@dataclass
class LightccConfig(BackendConfig):
    """How the workers of a LightccTrainer meet.

    timeout_s: for which ranks wait for each other in init(); default: the workers' HOROVOD_START_TIMEOUT, else 30.
    """

    timeout_s: Optional[int] = None

    @property
    def backend_cls(self) -> Any:
        return _LightccBackend


class _LightccBackend(Backend):
    share_cuda_visible_devices = True  # the local rank picks one, and NCCL reaches its neighbours'

    def on_start(self, worker_group: Any, backend_config: LightccConfig) -> None:
        """At the begin, and when Ray Train has started workers anew: they get a new meeting."""
        processes = worker_group.execute(placed.here)
        meeting = worker_group.execute_single(0, placed.open_meeting)
        ray.get([worker_group.execute_single_async(rank, _place, rank, processes, meeting, backend_config.timeout_s)
                 for rank in range(len(processes))])

    def on_shutdown(self, worker_group: Any, backend_config: LightccConfig) -> None:
        try:
            ray.get(worker_group.execute_async(shutdown), timeout=_LEAVE_S)
        except GetTimeoutError:  # a worker may still be in the user's function
            pass


def _place(rank: int, processes: Sequence[placed.Process], meeting: placed.Meeting, timeout_s: Optional[int]) -> None:
    if timeout_s is not None:
        os.environ["HOROVOD_START_TIMEOUT"] = str(timeout_s)
    placed.place(rank, processes, meeting)


class LightccTrainer(DataParallelTrainer):
    """Runs train_loop_per_worker on workers of Ray Train, which are the ranks of a lightcc job. It calls hvd.init(),
    and hvd.rank() is ray.train.get_context().get_world_rank().

    The arguments are those of Ray's HorovodTrainer and mean what they do in Ray Train: train_loop_config,
    scaling_config (num_workers, also a range where Ray Train has that, use_gpu, resources_per_worker), run_config (with
    FailureConfig(max_failures) and CheckpointConfig), datasets, dataset_config, metadata, resume_from_checkpoint.
    horovod_config: a LightccConfig. ray.train.report, get_checkpoint and get_dataset_shard work as ever. When a worker
    is lost, Ray Train starts all of them again, and they meet anew. Source: ray.train.horovod.HorovodTrainer.

        trainer = LightccTrainer(train, train_loop_config={"lr": 0.1}, scaling_config=ScalingConfig(num_workers=2))
        result = trainer.fit()
    """

    def __init__(self, train_loop_per_worker: Union[Callable[[], Any], Callable[[Dict[str, Any]], Any]], *,
                 train_loop_config: Optional[Dict[str, Any]] = None, horovod_config: Optional[LightccConfig] = None,
                 **arguments: Any) -> None:
        super().__init__(train_loop_per_worker, train_loop_config=train_loop_config,
                         backend_config=horovod_config or LightccConfig(), **arguments)
