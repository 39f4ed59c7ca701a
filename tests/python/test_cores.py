"""How many threads a rank computes with: the cores of its host, of which a control group may allow a part."""
import os

import pytest

from lightcc.launch.cores import threads_each, usable_cores


def host(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


@pytest.mark.parametrize("files, cores", [
    ({}, 64),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
    ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
      "sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/of/the/host\n", "sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
    ({"proc/self/cgroup": "0::/../outside\n", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
    ({"proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/a\n0::/\n", "sys/fs/cgroup/cpu.max": "nonsense",
      "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "800000\n",
      "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 8),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 64),
    ({"proc/self/cgroup": "\n::\nrubbish\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 64),
])
def test_cores_are_those_we_may_run_on_within_the_quota(files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert usable_cores(host(tmp_path, files)) == cores


@pytest.mark.parametrize("environment, cores, ranks, each", [
    ({}, 8, 2, 4), ({}, 8, 3, 2), ({}, 2, 4, 1), ({"OMP_NUM_THREADS": ""}, 8, 1, 8),
    ({"OMP_NUM_THREADS": "3"}, 8, 2, None),
])
def test_each_rank_gets_its_share(environment, cores, ranks, each):
    assert threads_each(environment, cores, ranks) == each
