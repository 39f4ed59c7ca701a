"""Sessions of Spark that all tests share, since each takes 10 s and more to start: a classic one, whose two executors
are JVMs of their own as on a cluster, and one of Spark Connect, whose server is on loopback."""
import contextlib
import errno
import os
import socket
import sys
import uuid

import pytest

from jobs import LONGEST_S, MARK, command_of, marked, wait_until

OWN_MARK = uuid.uuid4().hex  # of all that this process starts


@pytest.fixture(scope="session", params=("classic", "connect"))
def spark(request, tmp_path_factory):
    from pyspark.sql import SparkSession

    folder = str(tmp_path_factory.mktemp("spark"))
    os.environ.update({MARK: OWN_MARK, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
                       "SPARK_LOCAL_DIRS": folder, "SPARK_WORKER_DIR": folder})
    builder = SparkSession.builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
    if request.param == "classic":
        yield from until_stopped(builder.master("local-cluster[2,1,600]").config("spark.executor.memory", "600m"))
    else:
        with port_of_connect():
            yield from until_stopped(builder.remote("local[2]"))


def until_stopped(builder):
    session = builder.getOrCreate()
    yield session
    session.stop()


@contextlib.contextmanager
def port_of_connect():
    """The local server always has port 15002, so one run of these tests has it at a time. Whoever has bound this name
    may take it: a name is of the same network namespace as a port, and free when its process has ended."""
    with socket.socket(socket.AF_UNIX) as holder:
        def take():
            try:
                holder.bind("\0lightcc-tests-spark-connect")
            except OSError as error:
                assert error.errno == errno.EADDRINUSE, error
                return False
            return True

        wait_until(take, "another run of these tests to leave Spark Connect's port", within_s=LONGEST_S)
        yield


@pytest.fixture(autouse=True)
def nobody_is_left(request):
    """No rank or agent that a test has started."""
    yield
    if "spark" in request.fixturenames:
        wait_until(lambda: not ranks_here(), "all ranks to end", ranks_here)


def ranks_here():
    return [process for process in marked(OWN_MARK)
            if {"lightcc.launch.placed_child", "lightcc.launch.agent", "lightcc.launch.task"} & {*command_of(process)}]
