"""HorovodRunner, as it was part of Databricks' runtime."""
from typing import Any, Callable

from lightcc.runner.api import run as run_here
from lightcc.spark.runner import run


class HorovodRunner:
    """Runs a function on ranks. np: > 0: so many tasks of Spark; 0: as many as Spark runs at the same time; < 0: -np
    processes on the driver's machine, without Spark. driver_log_verbosity: "all" prints what the ranks print;
    "log_callback_only" does not. Source: sparkdl.HorovodRunner.

        HorovodRunner(np=2).run(train, lr=0.1)  # what rank 0 returns
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity not in ("all", "log_callback_only"):
            raise ValueError(f'HorovodRunner: driver_log_verbosity={driver_log_verbosity!r}: expected "all" or '
                             '"log_callback_only"')
        self.num_processor = np
        self._verbose = driver_log_verbosity == "all"

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """main(**kwargs) on every rank; what it returns on rank 0. Errors: as those of lightcc.run or
        lightcc.spark.run."""
        if self.num_processor < 0:
            return run_here(main, kwargs=kwargs, num_proc=-self.num_processor)[0]
        return run(main, kwargs=kwargs, num_proc=self.num_processor or None, verbose=int(self._verbose))[0]
