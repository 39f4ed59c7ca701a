"""RayExecutor: ranks that are actors of Ray, for as many calls as the user likes."""
import functools
import io
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightcc.launch import pickling
from lightcc.ray import placement, ray_logger
from lightcc.ray.elastic import ElasticRayExecutor, ElasticSettings
from lightcc.ray.failures import Failure, described, wait_s
from lightcc.ray.worker import BaseHorovodWorker, Whereabouts


@dataclass
class Settings:
    """Of RayExecutor.create_settings, which describes them."""

    timeout_s: int = 30
    placement_group_timeout_s: int = 100
    ssh_identity_file: Optional[str] = None
    ssh_str: Optional[str] = None
    nics: Optional[Sequence[str]] = None

    def environment(self) -> Dict[str, str]:
        """Of the workers."""
        found = {"HOROVOD_START_TIMEOUT": str(self.timeout_s)}
        if self.nics:
            found["LIGHTCC_IFACE"] = "=" + ",".join(self.nics)
        return found


class RayExecutor:
    """Runs functions on ranks that are actors of Ray.

    settings: of create_settings(), or None. num_workers: ranks, packed on as few nodes as can be; or num_hosts nodes
    with num_workers_per_host ranks each. cpus_per_worker: cores that Ray reserves for each; use_gpu, gpus_per_worker:
    GPUs of each, by default 1 with use_gpu. Each worker sees all GPUs that the workers of its node have, so
    hvd.local_rank() picks one. use_current_placement_group: the workers go into the placement group in which the caller
    runs, if there is one; else a new one is made.

    min_workers makes the job elastic, as an ElasticRayExecutor's, which describes max_workers, reset_limit,
    cooldown_range, elastic_timeout and override_discovery: it has start, run and shutdown, and run returns the results
    of min_workers ranks.

    Errors: RuntimeError without ray.init(); ValueError for arguments that contradict each other. Source:
    horovod.ray.RayExecutor.

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        executor.start()
        losses = executor.run(train, args=(0.1,))
        executor.shutdown()
    """

    @classmethod
    def create_settings(cls, timeout_s: int = 30, ssh_identity_file: Optional[str] = None,
                        ssh_str: Optional[str] = None, placement_group_timeout_s: int = 100,
                        nics: Optional[Sequence[str]] = None) -> Settings:
        """timeout_s: for which ranks wait for each other in init. placement_group_timeout_s: for which Ray may look for
        room. nics: network interfaces between the nodes, all at once; default: the one that leads to rank 0. The two of
        ssh have no effect, since Ray starts the ranks."""
        return Settings(timeout_s, placement_group_timeout_s, ssh_identity_file, ssh_str, nics)

    def __init__(self, settings: Optional[Settings], num_workers: Optional[int] = None, num_hosts: Optional[int] = None,
                 num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False,
                 gpus_per_worker: Optional[int] = None, use_current_placement_group: bool = True,
                 min_workers: int = None, max_workers: int = None, reset_limit: int = None,
                 cooldown_range: List[int] = None, elastic_timeout: int = 600,
                 override_discovery: bool = True) -> None:
        if min_workers is not None and num_workers is not None:
            raise ValueError("RayExecutor: give num_workers, or min_workers of an elastic job, not both")
        if max_workers is not None and min_workers is None:
            raise ValueError("RayExecutor: max_workers is for elastic jobs, which have min_workers too")
        self.settings = settings or Settings()
        self.workers: List[Any] = []
        self._elastic: Optional[ElasticRayExecutor] = None
        if min_workers is not None:
            elastic = ElasticSettings(min_workers, max_workers, reset_limit, elastic_timeout, self.settings.timeout_s,
                                      self.settings.nics, cooldown_range and tuple(cooldown_range))
            self._elastic = ElasticRayExecutor(elastic, use_gpu, cpus_per_worker, gpus_per_worker, None,
                                               override_discovery)
            return
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("RayExecutor: give either num_workers, or num_hosts and num_workers_per_host")
        if min(num_workers or num_hosts or 0, num_workers_per_host) < 1:
            raise ValueError("RayExecutor: there must be at least 1 worker")
        if gpus_per_worker and not use_gpu:
            raise ValueError(f"RayExecutor: gpus_per_worker={gpus_per_worker} needs use_gpu=True")
        if gpus_per_worker is not None and gpus_per_worker < 1:
            raise ValueError(f"RayExecutor: gpus_per_worker={gpus_per_worker}: at least 1 is expected")
        resources: Dict[str, float] = {"CPU": cpus_per_worker}
        if use_gpu:
            resources["GPU"] = gpus_per_worker or 1
        self._resources = resources
        self._bundles = (placement.packed(num_workers, resources) if num_workers is not None
                         else placement.spread(num_hosts or 1, num_workers_per_host, resources))
        self._use_current = use_current_placement_group
        self._group: Any = None   # ours, to be removed
        self._where: List[str] = []  # by rank, for people
        self._failed = False      # the last call has left the ranks in different worlds

    def start(self, executable_cls: Optional[Callable[..., Any]] = None, executable_args: Optional[List[Any]] = None,
              executable_kwargs: Optional[Dict[str, Any]] = None,
              extra_env_vars: Optional[Dict[str, str]] = None) -> None:
        """Starts the workers, and an object executable_cls(*executable_args, **executable_kwargs) on each.

        extra_env_vars: of the workers. Errors: TimeoutError if Ray has no room in time, with what was asked and what
        is free; RuntimeError without ray.init(), and with rank and node if a worker fails.
        """
        if self._elastic:
            if executable_cls is not None:
                raise ValueError("RayExecutor.start: the ranks of an elastic job come and go, and have no executable")
            self._elastic.start(extra_env_vars)
            return
        if not ray.is_initialized():
            raise RuntimeError("RayExecutor.start: there is no connection to Ray; call ray.init(), or "
                               "ray.init(address=...) for a cluster, before it")
        if self.workers:
            raise RuntimeError("RayExecutor.start: it has been started; call shutdown() first")
        try:
            self._start({**self.settings.environment(), **(extra_env_vars or {})})
            self._wait([worker.start_executable.remote(executable_cls, executable_args, executable_kwargs)
                        for worker in self.workers])
        except BaseException:
            self.shutdown()
            raise

    def _start(self, variables: Dict[str, str]) -> None:
        group = get_current_placement_group() if self._use_current else None
        if group is None:
            self._group = group = placement.create_placement_group(
                self._bundles.each, self._bundles.count, self.settings.placement_group_timeout_s,
                self._bundles.strategy)
        own = self._group is not None
        actor = ray.remote(BaseHorovodWorker)
        self.workers = [actor.options(
            num_cpus=self._resources["CPU"], num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle if own else -1)).remote()
            for bundle in self._bundles.bundle_of]
        self._where = ["a node that is not known yet"] * len(self.workers)
        whereabouts = [worker.whereabouts.remote() for worker in self.workers]
        if not own:
            self._check_room(whereabouts)
        found = self._wait(whereabouts)
        nodes = [one.node for one in found]
        order = sorted(range(len(nodes)), key=lambda worker: nodes.index(nodes[worker]))  # those of a node together
        self.workers = [self.workers[worker] for worker in order]
        found = [found[worker] for worker in order]
        self._where = [f"host {one.host} (node {one.node})" for one in found]
        self._wait([worker.update_env_vars.remote({**variables, **_visible_gpus(one, found)})
                    for worker, one in zip(self.workers, found)])
        self._wait(self._meet())

    def _check_room(self, whereabouts: Sequence[Any]) -> None:
        """In a group that is not ours: Ray would wait for ever for what it has no room for."""
        timeout_s = self.settings.placement_group_timeout_s
        there, missing = ray.wait(list(whereabouts), num_returns=len(whereabouts), timeout=timeout_s)
        if missing:
            raise TimeoutError(
                f"RayExecutor.start: after {timeout_s:g} s the placement group of the caller has had room for "
                f"{len(there)} of {len(whereabouts)} workers with {{{placement.text(self._resources)}}} each. Ask for "
                "fewer workers, give the group more, or make a new one: use_current_placement_group=False")

    def run(self, fn: Callable[..., Any], args: Optional[Sequence[Any]] = None,
            kwargs: Optional[Dict[str, Any]] = None,
            callbacks: Optional[Iterable[Callable[[Any], Any]]] = None) -> List[Any]:
        """fn(*args, **kwargs) on every rank; its results in rank order.

        callbacks: each is called, here, with what rank 0 gives to ray_logger.log(). Errors: RuntimeError with rank,
        node and traceback of the first failure, an exception or a process that ended; TypeError, which names the
        variable, if something of the call cannot be pickled.
        """
        if self._elastic:
            return self._elastic.run(functools.partial(fn, *(args or ()), **(kwargs or {})),
                                     list(callbacks) if callbacks else None)
        call = self._call("run", fn, args, kwargs)
        return self._run(lambda worker: worker.call.remote(call), callbacks)

    def run_remote(self, fn: Callable[..., Any], args: Optional[Sequence[Any]] = None,
                   kwargs: Optional[Dict[str, Any]] = None) -> List[Any]:
        """As run, without waiting: Ray's references to the results, in rank order."""
        call = self._call("run_remote", fn, args, kwargs)
        self._meet()
        return [worker.call.remote(call) for worker in self.workers]

    def execute(self, fn: Callable[[Any], Any],
                callbacks: Optional[Iterable[Callable[[Any], Any]]] = None) -> List[Any]:
        """fn(executable) on every rank; as run else. The executable is the object that start() has made there."""
        self._check_started("execute")
        return self._run(lambda worker: worker.execute.remote(fn), callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """fn(executable) on rank 0 alone, and its result."""
        self._check_started("execute_single")
        return self._wait([self.workers[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """Ends the workers and gives their resources back. start() may follow."""
        if self._elastic:  # nothing of it lives between two runs
            return
        for worker in self.workers:
            ray.kill(worker)
        if self._group is not None:
            remove_placement_group(self._group)
        self.workers, self._where, self._group, self._failed = [], [], None, False

    def _check_started(self, method: str) -> None:
        if self._elastic:
            raise ValueError(f"RayExecutor.{method}: an elastic job, whose ranks come and go, has run() only")
        if not self.workers:
            raise RuntimeError(f"RayExecutor.{method}: there are no workers; call start() first")

    def _call(self, method: str, fn: Callable[..., Any], args: Optional[Sequence[Any]],
              kwargs: Optional[Dict[str, Any]]) -> Any:
        """The call as Ray carries it, once for all workers."""
        self._check_started(method)
        pickling.check(fn, () if args is None else args, kwargs)
        call = fn, tuple(args or ()), dict(kwargs or {})
        try:
            return ray.put(call)
        except Exception:
            pickling.write(io.BytesIO(), *call)  # raises TypeError, which names what cannot be pickled
            raise

    def _meet(self) -> List[Any]:
        """Gives the ranks a new meeting, unless all of them are in a world. Waits for nothing: what is called on a
        worker afterwards comes after it."""
        here = [worker.here.remote(self._failed) for worker in self.workers]
        self._failed = False
        meeting = self.workers[0].open_meeting.remote(*here)
        return [worker.place.remote(rank, meeting, *here) for rank, worker in enumerate(self.workers)]

    def _run(self, begin: Callable[[Any], Any], callbacks: Optional[Iterable[Callable[[Any], Any]]]) -> List[Any]:
        callbacks = list(callbacks or ())
        self._wait(self._meet())
        if not callbacks:
            return self._wait([begin(worker) for worker in self.workers])
        channel = ray.remote(ray_logger.Channel).options(num_cpus=0).remote()
        try:
            self._wait([self.workers[0].log_to.remote(channel)])
            return self._wait([begin(worker) for worker in self.workers], channel, callbacks)
        finally:
            self.workers[0].log_to.remote(None)  # which comes before what is called next on it
            ray.kill(channel)

    def _wait(self, references: Sequence[Any], channel: Any = None,
              callbacks: Sequence[Callable[[Any], Any]] = ()) -> List[Any]:
        """What the workers return, by rank. channel: in which rank 0 logs for the callbacks."""
        results: Dict[int, Any] = {}
        failures: List[Failure] = []
        waiting = {reference: rank for rank, reference in enumerate(references)}
        log = _Log(channel, callbacks)
        while waiting:
            ready, _ = ray.wait([*waiting, *([] if failures else log.news)], timeout=wait_s(failures))
            if not ready:
                break
            for reference in ready:
                if reference not in waiting:
                    log.heed()
                    continue
                rank = waiting.pop(reference)
                try:
                    results[rank] = ray.get(reference)
                except RayError as error:  # a RayTaskError is also of the class that the function has raised
                    failures.append(Failure(rank, self._where[rank], not isinstance(error, RayTaskError), error))
        if failures:
            self._failed = True
            raise described(failures) from None
        log.finish()
        return [results[rank] for rank in range(len(references))]


class _Log:
    """What rank 0 has logged, for the callbacks of a run."""

    def __init__(self, channel: Any, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._channel, self._callbacks, self._told = channel, callbacks, 0
        self.news: List[Any] = []  # the reference to what comes next
        self._ask()

    def heed(self) -> None:
        self._tell(ray.get(self.news[0]))
        self._ask()

    def finish(self) -> None:
        """When nobody logs any more."""
        if self._channel is not None:
            self._tell(ray.get(self._channel.since.remote(self._told, False)))

    def _ask(self) -> None:
        if self._channel is not None:
            self.news = [self._channel.since.remote(self._told, True)]

    def _tell(self, infos: Sequence[Any]) -> None:
        self._told += len(infos)
        for info in infos:
            for callback in self._callbacks:
                callback(info)


def _visible_gpus(one: Whereabouts, workers: Sequence[Whereabouts]) -> Dict[str, str]:
    """All that the workers of its node have: the local rank picks one, and NCCL reaches its neighbours'."""
    gpus = sorted({gpu for worker in workers if worker.node == one.node for gpu in worker.gpus})
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
