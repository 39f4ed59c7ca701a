"""Jobs on two hosts whose datagrams do not get through, or are flooded with those of others. Neither costs a host that
is there, and one that is lost meanwhile is found in under 5 s."""
import contextlib
import os
import subprocess
import sys
import time

import flood
import pytest
from flood import sniff
from test_faults import expect_errors, firewall, listening, with_nft

from jobs import wait_until
from watched import Watched

FLOOD_S, RATE, NOBODY = 6, 5_000, "65534"  # bench/strangers.py sends all that a machine can


@with_nft
def test_a_host_of_which_no_datagram_comes_any_more_is_not_lost_until_it_is(hosts):
    """Its ranks answer over TCP. Of HARP's datagrams only the heartbeats are dropped."""
    with Watched(hosts, "h0:2,h1:2") as two, Watched(hosts, "h0:1,h1:1", LIGHTCC_NET="harp") as harp, \
            Watched(hosts, "h0:2,h1:1", "compute=4.5") as idle:
        jobs = [two, harp, idle]
        for job in jobs:
            job.wait_ready(steps=1 if job is idle else 2)  # heartbeats have come
        ports = ",".join(map(str, listening(hosts, "h1")))  # TCP's, and of the same numbers the heartbeats'
        with firewall(hosts, "h1", f"udp dport {{{ports}}} drop", f"udp sport {{{ports}}} drop"):
            for job in jobs:
                wait_until(lambda job=job: job.err().count("and is not taken for lost") == len(job.ranks),
                           "the warning of each rank", job.err)
            for job in (two, harp):
                job.go_on(steps=1)
            hosts.cut("h1")
            since = time.monotonic()
            try:
                for job in jobs:
                    expect_errors(job, job.on("h0"), since, map(job.name, job.on("h1")))
                    expect_errors(job, job.on("h1"), since, [])
            finally:
                hosts.restore("h1")
            for job in jobs:
                err = job.finish()
                assert err.count("\n") == err.count("[lightcc") == len(job.ranks), err


def heartbeat_to(hosts, host, source):
    """One that has just come there, and its port."""
    (packet,) = sniff(hosts, host, hosts.addresses(source)[0], 1)  # TCP carries the rest
    assert packet[8:].startswith(b"lccb")
    return packet[8:], int.from_bytes(packet[2:4], "big")


@contextlib.contextmanager
def floods(hosts, host, ports, *payloads):
    """Of each of these, from another host and by another user of this one."""
    command = ["nice", "-n", "19", sys.executable, "-S", flood.__file__, hosts.addresses(host)[0],
               ",".join(map(str, ports))]
    strangers = [hosts.popen(at, [*command, payload.hex(), "--rate", str(RATE), "--seconds", "60", *user],
                             stdout=subprocess.PIPE)
                 for payload in payloads for at, user in (("h2", []), (host, ["--user", NOBODY]))]
    try:
        for stranger in strangers:
            assert stranger.stdout.readline() == "flooding\n"
        yield
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.communicate()


@pytest.mark.slow
def test_floods_of_datagrams_end_no_job(hosts):
    """To all UDP ports of a host: heartbeats' and HARP's. Those of strangers hide no heartbeat. Of whoever reads along
    and sends the job's own again, heartbeats are hidden, and the host answers over TCP. One that is lost meanwhile is
    found."""
    with Watched(hosts, "h0:1,h1:1") as earlier:
        earlier.wait_ready()
        replayed, _ = heartbeat_to(hosts, "h0", "h1")
        earlier.stop()
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(Watched(hosts, "h0:1,h1:1"))
        tcp.wait_ready()
        own, port = heartbeat_to(hosts, "h0", "h1")
        harp = stack.enter_context(Watched(hosts, "h0:1,h1:1", LIGHTCC_NET="harp"))
        harp.wait_ready()
        jobs = [tcp, harp]

        def go_on_for_a_while():
            until = time.monotonic() + FLOOD_S
            while time.monotonic() < until:
                for job in jobs:
                    job.go_on()

        ports = listening(hosts, "h0", "u")
        assert len(ports) == 3
        with floods(hosts, "h0", ports, b"", os.urandom(len(replayed)), replayed):
            go_on_for_a_while()
            assert "heartbeat" not in tcp.err() + harp.err()
            with floods(hosts, "h0", [port], own):
                go_on_for_a_while()
                hosts.cut("h1")
                since = time.monotonic()
                try:
                    for job in jobs:
                        expect_errors(job, [0], since, [job.name(1)])
                        expect_errors(job, [1], since, [job.name(0)])
                finally:
                    hosts.restore("h1")
        for job in jobs:
            job.finish()
