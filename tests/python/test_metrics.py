"""The metrics of a job: in the program, on rank 0's page and in its file, read by Prometheus's own parser; what becomes
of ports and files that cannot be had; TensorBoard's scalars; the dashboard."""
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lightcc.numpy
import ranks
from lightcc.common.elastic import HorovodInternalError, ObjectState, run_fn
from lightcc.core import metrics, metrics_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_label(family, label):
    return {sample.labels[label]: sample.value for sample in family.samples}


# In the program

def check_every_metric_is_there():
    hvd = lightcc.numpy
    hvd.init()
    found = hvd.metrics()
    assert list(found) == [metric.name for metric in metrics.METRICS] + ["waiting_by_peer"]
    assert found["ranks"] == hvd.size() and 0 <= found["exposed_share"] <= 1 and found["uptime_seconds"] > 0
    assert set(found["waiting_by_peer"]) == (set(range(hvd.size())) if hvd.rank() == 0 else set())
    assert all(isinstance(found[metric.name], (int, float)) for metric in metrics.METRICS)


def check_counters_count():
    hvd = lightcc.numpy
    hvd.shutdown()  # steps are told by the first tensor of a world, and other checks have theirs
    hvd.init()
    before = hvd.metrics()
    for _ in range(5):
        handles = [hvd.allreduce_async(np.ones(1000, np.float32), name=f"metrics.{i}") for i in range(3)]
        for handle in handles:
            hvd.synchronize(handle)
    now = hvd.metrics()
    added = {name: now[name] - before[name] for name in now if name != "waiting_by_peer"}
    assert added["requests"] == 15 and added["payload_bytes"] >= 15 * 4000
    assert added["steps"] == 5
    assert 0 < added["exposed_seconds"] <= added["uptime_seconds"]
    assert added["sent_bytes"] == 0 or hvd.cross_size() > 1


def check_rank_0_knows_for_whom_it_waited():
    hvd = lightcc.numpy
    hvd.init()
    if hvd.size() == 1:
        return
    before = hvd.metrics()["waiting_by_peer"]
    late = hvd.size() - 1
    for _ in range(3):
        if hvd.rank() == late:
            hvd.barrier()    # the others have submitted it
            time.sleep(0.1)  # it is what is measured: this rank computes
        handle = hvd.allreduce_async(np.ones(4), name="metrics.late")
        if hvd.rank() != late:
            hvd.barrier()
        hvd.synchronize(handle)
    now = hvd.metrics()["waiting_by_peer"]
    if hvd.rank() == 0:
        assert now[late] - before[late] >= 0.25


def check_elastic_resets():
    hvd = lightcc.numpy
    hvd.init()
    before = hvd.metrics()["elastic_resets"]
    failures = [HorovodInternalError("a peer died")] * 2

    def train(state):
        if failures:
            raise failures.pop()

    run_fn(train, reset=lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank, step=0))
    assert hvd.metrics()["elastic_resets"] == before + 2


def check_scalars_for_tensorboard():
    hvd = lightcc.numpy
    hvd.init()

    class Writer:
        scalars = {}

        def add_scalar(self, tag, value, step):
            self.scalars[tag] = value, step

    hvd.write_metrics(Writer(), 3)
    names = {f"lightcc/{metric.name}" for metric in metrics.METRICS}
    waiting = {f"lightcc/waiting_seconds/{rank}" for rank in range(hvd.size())} if hvd.rank() == 0 else set()
    assert set(Writer.scalars) == names | waiting and Writer.scalars["lightcc/ranks"] == (hvd.size(), 3)
    with pytest.raises(TypeError, match="no add_scalar"):
        hvd.write_metrics(object(), 3)


def test_before_init():
    with pytest.raises(ValueError, match="init"):
        lightcc.numpy.metrics()


# On the page

JOB = """
import os, re, socket, socketserver, sys, threading, time, urllib.error, urllib.request
import numpy as np
import lightcc.numpy as hvd
from lightcc.core import metrics_page
metrics_page.REPORT_S = metrics_page.LINE_S = 0.1
socketserver.BaseServer.serve_forever.__defaults__ = (1e6,)  # a page that waits for the server's next look never ends
socket.getfqdn = None                                        # it asks DNS, which may take long
logged, log = threading.Event(), metrics_page.lib.log

def note(level, text):
    log(level, text)
    if "steps/s" in text:
        logged.set()
metrics_page.lib.log = note
out = sys.argv[1]

def steps():
    for _ in range(10):
        handles = [hvd.allreduce_async(np.ones(1000, np.float32), name=name) for name in "ab"]
        for handle in handles:
            hvd.synchronize(handle)

def begin(place):
    os.environ["LIGHTCC_METRICS"] = place
    hvd.init()

def server():
    return metrics_page._publisher.server

try:
    os.environ["LIGHTCC_METRICS"] = "0"
    hvd.init(process_sets=[[0, 7]])
    raise SystemExit("a process set with a rank that does not exist was taken")
except ValueError:  # lightcc is initialised all the same, and shows its metrics
    assert hvd.metrics()["uptime_seconds"] < 300 and (hvd.rank() != 0 or server())
steps()
if hvd.rank() == 0:
    address, port = server().server_address[:2]
    assert address == "127.0.0.1", address
    url, deadline = f"http://127.0.0.1:{port}/metrics", time.monotonic() + 200
    while True:  # until the other rank has reported its last step
        page = urllib.request.urlopen(url).read().decode()
        if len(re.findall(r'lightcc_steps_total\\{[^}]*\\} 10\\n', page)) == 2:
            break
        assert time.monotonic() < deadline, page
        time.sleep(0.01)
    open(out + ".page", "w").write(page)
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/secret")
        raise SystemExit("a page that does not exist was served")
    except urllib.error.HTTPError as error:
        assert error.code == 404
    assert logged.wait(200), "no line of the log came"
hvd.barrier()
hvd.init()  # a second init changes nothing
assert hvd.rank() != 0 or server().server_address[1] == port
hvd.shutdown()

begin(out)
steps()
hvd.shutdown()

taken = socket.create_server(("127.0.0.1", 0))
for place in (str(taken.getsockname()[1]), "/no/such/folder/metrics.prom", "192.0.2.1:9400", out + ".link"):
    begin(place)
    steps()
    hvd.shutdown()
os.environ["LIGHTCC_METRICS"] = "70000"
try:
    hvd.init()
    raise SystemExit("port 70000 was taken")
except ValueError as error:
    assert "LIGHTCC_METRICS=70000" in str(error) and "a port from 0 to 65535" in str(error), error
print("done", hvd.is_initialized())
"""


def test_a_job_shows_its_metrics(tmp_path):
    """And goes on where it cannot."""
    out = tmp_path / "metrics.prom"
    (tmp_path / "metrics.prom.link").symlink_to("/dev/null")
    code, output = ranks.launch(2, ["-c", JOB, str(out)], ranks.DEADLINE_S, HOROVOD_LOG_LEVEL="info",
                                LIGHTCC_SECRET="a-secret-of-the-job")
    assert code == 0 and output.count("done False") == 2, output
    for text in ((tmp_path / "metrics.prom.page").read_text(), out.read_text()):
        found = families(text)
        assert set(found) == {metric.page_name.removesuffix("_total") for metric in (
            *metrics.METRICS, metrics.WAITING)} | {"lightcc_reported_timestamp_seconds"}
        for metric in metrics.METRICS:
            assert found[metric.page_name.removesuffix("_total")].type == metric.kind
        assert "0" in by_label(found["lightcc_steps"], "rank") and set(by_label(found["lightcc_waiting_seconds"],
                                                                                "peer")) == {"0", "1"}
        assert "secret" not in text
    page = families((tmp_path / "metrics.prom.page").read_text())
    assert by_label(page["lightcc_steps"], "rank") == {"0": 10, "1": 10}
    assert by_label(page["lightcc_ranks"], "rank") == {"0": 2, "1": 2}
    assert sorted(os.listdir(tmp_path)) == ["metrics.prom", "metrics.prom.link", "metrics.prom.page"]
    assert os.readlink(f"{out}.link") == "/dev/null"
    warnings = re.findall(r"WARNING.*LIGHTCC_METRICS=(.*?): rank 0 on host \S+ cannot (.*)", output)
    assert [why for _, why in warnings if "in use" in why and "Choose a port that is free" in why], output
    assert ("/no/such/folder/metrics.prom", warnings[1][1]) == warnings[1] and "No such file" in warnings[1][1]
    assert "192.0.2.1:9400" == warnings[2][0] and "an address of this host" in warnings[2][1]
    assert f"{out}.link" == warnings[3][0] and "no regular file" in warnings[3][1]
    assert len(warnings) == 4 and all(why.endswith("Training goes on without") for _, why in warnings)
    assert re.search(r"INFO rank 0 .*metrics: http://127.0.0.1:\d+/metrics", output)
    assert re.search(r"INFO rank 0 .*metrics: [\d.e+-]+ steps/s, [\d.e+-]+ % of the time exposed; ", output), output


def test_the_page_escapes_what_it_is_told():
    values = {**{metric.name: 1 for metric in metrics.METRICS}, "host": 'a"b\\c\nd', "reported_at": 1.5}
    found = families(metrics_page.text_of({3: values}, {3: 0.25}))
    assert found["lightcc_steps"].samples[0].labels == {"rank": "3", "host": 'a"b\\c\nd'}
    assert by_label(found["lightcc_waiting_seconds"], "peer") == {"3": 0.25}


@pytest.mark.parametrize("place, address", [
    ("9400", ("127.0.0.1", 9400)), ("0.0.0.0:9400", ("0.0.0.0", 9400)), ("[::1]:9400", ("::1", 9400)),
    ("node1:9400", ("node1", 9400)), (":9400", ("127.0.0.1", 9400)), ("metrics.prom", None), ("/tmp/9400", None),
    ("./9400", None)])
def test_where_the_metrics_are_shown(place, address):
    assert metrics_page._address_of(place) == address


def test_a_line_says_when_nobody_was_waited_for():
    old, new = {"steps": 0, "exposed_seconds": 0.0}, {"steps": 3, "exposed_seconds": 0.0}
    assert metrics_page.line_of({0: old}, {0: new}, {0: 0.0}, 60.0) == (
        "metrics: 0.05 steps/s, 0 % of the time exposed; no rank was waited for")
    assert metrics_page.line_of({}, {0: new}, {}, 60.0) == "metrics: no rank has reported yet"


# What is written about them

def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    known = {"lightcc_reported_timestamp_seconds", *(one.page_name for one in (*metrics.METRICS, metrics.WAITING))}
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"lightcc_\w+", target["expr"])}
    assert asked <= known and len(dashboard["panels"]) == len({panel["id"] for panel in dashboard["panels"]})
    assert {"lightcc_steps_total", "lightcc_waiting_seconds_total", "lightcc_elastic_resets_total"} <= asked


def test_the_page_of_docs_has_every_metric():
    page = (ROOT / "docs" / "metrics.md").read_text()
    for metric in metrics.METRICS:
        assert f"| `{metric.name}` | {metric.unit} | {metric.kind} | {metric.help[1:]}" in re.sub(
            r"(\| counter \| |\| gauge \| )\w", r"\1", page), metric.name
