"""Every flag and variable of Horovod does what it says, is reported as without effect, or is refused. Both are those of
tests/data/horovod_api.json."""
import json
import re
import sys
from pathlib import Path

import pytest

from jobs import environment, launch, start
from lightcc.elastic.membership import Limits
from lightcc.launch import hosts
from lightcc.runner import launch as launcher
from lightcc.runner.flags import SETTINGS, Switch, Value

ROOT = Path(__file__).parents[2]
MANIFEST = json.loads((ROOT / "tests" / "data" / "horovod_api.json").read_text())
NAMES = [name for entry in MANIFEST["horovodrun_cli"] for name in entry["flags"] if name.startswith("-")]
VARIABLES = {name: entry["sets_env"] for entry in MANIFEST["horovodrun_cli"] for name in entry["flags"]}
ELASTIC = {"--min-np": [1], "--min-num-proc": [1], "--max-np": [4], "--max-num-proc": [4], "--slots-per-host": [2],
           "--elastic-timeout": [600], "--reset-limit": [3], "--blacklist-cooldown-range": [1, 9],
           "--host-discovery-script": ["./hosts.sh"]}
MAKE_ELASTIC = {"--min-np", "--min-num-proc", "--max-np", "--max-num-proc", "--host-discovery-script"}
# Flags that become a variable: their value, if they take one, and the variable's.
SET = {
    "--start-timeout": (7, "7"), "--fusion-threshold-mb": (32, str(32 << 20)), "--cycle-time-ms": (3.5, "3.5"),
    "--cache-capacity": (9, "9"), "--hierarchical-allreduce": (None, "1"), "--no-hierarchical-allreduce": (None, "0"),
    "--hierarchical-allgather": (None, "1"), "--no-hierarchical-allgather": (None, "0"),
    "--torus-allreduce": (None, "1"), "--no-torus-allreduce": (None, "0"), "--autotune": (None, "1"),
    "--no-autotune": (None, "0"), "--autotune-log-file": ("log.csv", "log.csv"), "--autotune-warmup-samples": (4, "4"),
    "--autotune-steps-per-sample": (5, "5"), "--autotune-bayes-opt-max-samples": (6, "6"),
    "--autotune-gaussian-process-noise": (0.2, "0.2"), "--timeline-filename": ("t.json", "t.json"),
    "--timeline-mark-cycles": (None, "1"), "--no-timeline-mark-cycles": (None, "0"), "--no-stall-check": (None, "1"),
    "--stall-check": (None, "0"), "--stall-check-warning-time-seconds": (11, "11"),
    "--stall-check-shutdown-time-seconds": (12, "12"), "--mpi-threads-disable": (None, "1"),
    "--no-mpi-threads-disable": (None, "0"), "--tcp": (None, "1"), "--num-nccl-streams": (2, "2"),
    "--thread-affinity": (3, "3"), "--gloo-timeout-seconds": (40, "40"), "--log-level": ("INFO", "INFO"),
    "--log-with-timestamp": (None, "0"), "--log-without-timestamp": (None, "1"), "--log-hide-timestamp": (None, "1"),
    "--no-log-hide-timestamp": (None, "0"),
}
# Flags about which one line is said, and the rank starts.
REMARKED = {
    "--mpi": ([], "has no effect: "), "--jsrun": ([], "has no effect: "),
    "--mpi-args": (["btl tcp"], "has no effect: "), "--binding-args": (["socket"], "has no effect: "),
    "--network-interface": (["eth0"], "is deprecated; use --network-interfaces"),
    "--log-hide-timestamp": ([], "is deprecated; use --log-without-timestamp"),
    "--no-log-hide-timestamp": ([], "is deprecated; use --log-with-timestamp"),
}


@pytest.mark.parametrize("flag", sorted(SET))
def test_flags_that_set_a_variable(flag):
    """Said twice they say it once; the core tells of variables without effect, the launcher is silent."""
    value, text = SET[flag]
    given = [flag] if value is None else [flag, value]
    variables, err = environment(*given, *given)
    assert variables[VARIABLES[flag] or "HOROVOD_START_TIMEOUT"] == text
    expected = [f"lightccrun: {flag} {REMARKED[flag][1]}"] if flag in REMARKED else []
    assert err.splitlines() == expected


@pytest.mark.parametrize("flag", sorted(set(REMARKED) - set(SET)))
def test_flags_without_a_meaning_here_say_so_once(flag):
    given, text = [flag, *REMARKED[flag][0]], REMARKED[flag][1]
    _, err = environment(*given, *given)
    assert re.fullmatch(rf"lightccrun: {flag} {re.escape(text)}.*\n", err), err


@pytest.mark.parametrize("flag", sorted(set(ELASTIC) - MAKE_ELASTIC))
def test_flags_of_elastic_jobs_are_refused_in_others(flag):
    code, out, err = launch("-np", 1, flag, *ELASTIC[flag], "echo", "ran")
    assert (code, out) == (2, "")
    assert err == (f"lightccrun: {flag} is for elastic jobs: say --min-np, --max-np or --host-discovery-script too\n")


@pytest.mark.parametrize("given, limits", [
    (["-np", 4, "--min-np", 2], (4, 2, None, 600, None, None, 1, False)),
    (["--min-num-proc", 2], (2, 2, None, 600, None, None, 1, False)),
    (["-np", 2, "--max-num-proc", 8, "--elastic-timeout", 9.5, "--reset-limit", 3, "--failures-per-host", 2,
      "--blacklist-cooldown-range", 5, 60, "--newcomer-timeout", 7], (2, 2, 8, 9.5, 3, (5, 60), 2, False, 7)),
    (["-np", 2, "--max-np", 2, "--host-discovery-script", "x", "--slots-per-host", 2], (2, 2, 2, 600, None, None, 1,
                                                                                       True)),
])
def test_what_elastic_flags_mean(given, limits):
    args = launcher.parse_args([*map(str, given), "true"])
    assert args.elastic.limits() == Limits(*limits)


@pytest.mark.parametrize("given, message", [
    (["-np", 2, "--min-np", 3], "--min-np 3, -np 2: expected --min-np <= -np <= --max-np"),
    (["-np", 4, "--min-np", 1, "--max-np", 3], "--min-np 1, -np 4, --max-np 3: expected"),
    (["-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 9, 3], "--blacklist-cooldown-range: expected two times"),
    (["-np", 2, "--host-discovery-script", "x", "-H", "h:2"], "give either --host-discovery-script or hosts"),
    (["-np", 2, "--min-np", 1, "--slots-per-host", 2], "--slots-per-host is for hosts that a --host-discovery-script"),
    (["-np", 3, "--min-np", 1, "-H", "h:2"], "3 processes do not fit: the hosts have 2 slots"),
])
def test_elastic_flags_that_contradict_each_other(given, message):
    code, out, err = launch(*given, "echo", "ran")
    assert (code, out) == (2, "") and err.startswith(f"lightccrun: {message}"), err


def test_the_elastic_timeout_of_the_environment():
    code, _, err = start("-np", 1, "--min-np", 1, "true", HOROVOD_ELASTIC_TIMEOUT="soon").finish()
    assert (code, err) == (2, "lightccrun: HOROVOD_ELASTIC_TIMEOUT=soon: expected seconds, 0 or more\n")


@pytest.mark.parametrize("given, expected", [
    (["-np", 2], 2), (["--num-proc", 2], 2), (["-np", 1, "--gloo"], 1), (["-np", 1, "--disable-cache"], 1),
    (["-np", 2, "-H", "localhost:2"], 2), (["-np", 2, "--hosts", "localhost:2"], 2),
    (["-np", 1, "-p", 2222, "-i", "key"], 1), (["-np", 1, "--ssh-port", 22, "--ssh-identity-file", "key"], 1),
])
def test_flags_that_say_where_and_how_many(given, expected):
    code, out, err = launch(*given, "echo", "ran")
    assert (code, err) == (0, "") and sorted(out.splitlines()) == [f"[{r}]<stdout>:ran" for r in range(expected)]


@pytest.mark.parametrize("flag", ["-hostfile", "--hostfile"])
def test_a_file_of_hosts(flag, tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert launch("-np", 2, flag, tmp_path / "hosts", "true") == (0, "", "")


def test_interfaces_become_a_variable():
    one_by_one = ["--network-interface", "eth0", "--network-interface", "eth1"]
    for given in (["--network-interfaces", "eth0,eth1"], one_by_one):
        assert environment(*given)[0]["LIGHTCC_IFACE"] == "=eth0,eth1"


def test_flags_about_output(tmp_path):
    for flag in ("-prefix-timestamp", "--prefix-output-with-timestamp"):
        assert re.fullmatch(r"\w{3} \w{3} .*\[0\]<stdout>:hi\n", launch("-np", 1, flag, "echo", "hi")[1])
    code, _, err = launch("-np", 1, "--output-filename", tmp_path / "out", "--verbose", "--cycle-time-ms", 2, "echo",
                          "hi")
    assert code == 0 and (tmp_path / "out" / "rank.0" / "stdout").read_text() == "hi\n"
    assert "HOROVOD_CYCLE_TIME=2.0" in err


ELSEWHERE = {"-np", "--num-proc", "--gloo", "--disable-cache", "-H", "--hosts", "-p", "--ssh-port", "-i",
             "--ssh-identity-file", "-hostfile", "--hostfile", "--network-interfaces", "-prefix-timestamp",
             "--prefix-output-with-timestamp", "--output-filename", "--verbose", "-v", "--version", "-cb",
             "--check-build", "--config-file"}  # flags with a test of their own here


def test_no_flag_of_horovodrun_is_forgotten():
    assert set(NAMES) == set(SET) | set(REMARKED) | set(ELASTIC) | ELSEWHERE
    assert set(NAMES) <= set(launcher.parser()._option_string_actions)
    assert {flag for flag, variable in VARIABLES.items() if variable} <= set(SET)


def test_hidden_flags_are_hidden():
    words = set(re.findall(r"(?<![\w-])--?[a-zH][\w-]*", launcher.parser().format_help()))
    hidden = {name for entry in MANIFEST["horovodrun_cli"] if entry["hidden"] for name in entry["flags"]}
    assert hidden & words == set()
    assert set(NAMES) - hidden - words == {"--network-interface"}


@pytest.mark.parametrize("given, message", [
    (["--gloo", "--mpi"], "argument --mpi: not allowed with argument --gloo"),
    (["--mpi", "--jsrun"], "argument --jsrun: not allowed with argument --mpi"),
    (["-H", "h:1", "-hostfile", "hosts"], "argument -hostfile/--hostfile: not allowed with argument -H/--hosts"),
    (["--min-np", "0"], "'0' is not a whole number, 1 or more"),
    (["--elastic-timeout", "-1"], "'-1' is not a number of seconds, 0 or more"),
    (["--grace-period", "soon"], "'soon' is not a number of seconds, 0 or more"),
    (["--reset-limit", "1.5"], "'1.5' is not a whole number, 0 or more"),
    *[([setting.on, setting.off], f"argument {setting.off}: not allowed with argument {setting.on}")
      for setting in SETTINGS if isinstance(setting, Switch)],
    (["--log-hide-timestamp", "--log-with-timestamp"], "not allowed with argument"),
    (["--cache-capacity", "-1"], "'-1' is not a whole number, 0 or more"),
    (["--cycle-time-ms", "nan"], "'nan' is not a number, 0 or more"),
    (["--autotune-gaussian-process-noise", "1.5"], "'1.5' is not a number from 0 to 1"),
    (["--fusion-threshold-mb", "1.5"], "'1.5' is not a whole number of MB"),
    (["--stall-check-warning-time-seconds"], "expected one argument"),
])
def test_contradictions_and_wrong_values_are_usage_errors(given, message, capsys):
    with pytest.raises(SystemExit) as end:
        launcher.parse_args(["-np", "1", *given])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_start_timeout_in_the_environment_is_read_too():
    code, _, err = start("-np", 1, "true", HOROVOD_START_TIMEOUT="soon").finish()
    assert (code, err) == (2, "lightccrun: HOROVOD_START_TIMEOUT=soon: expected seconds, 0 or more\n")


def test_the_last_of_several_values_counts():
    args = launcher.parse_args(["-np", "1", "-np", "3", "--log-level", "INFO", "--log-level", "debug", "true"])
    assert args.num_proc == 3 and args.settings == {"HOROVOD_LOG_LEVEL": "DEBUG"}


def test_the_commands_own_arguments_are_left_alone():
    args = launcher.parse_args(["-np", "1", "train.py", "--log", "x", "--min-np", "2", "--host", "--", "-v"])
    assert args.command == ["train.py", "--log", "x", "--min-np", "2", "--host", "--", "-v"] and not args.settings


# A job of LSF

def test_lsf_says_how_many_and_where(monkeypatch):
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "localhost 2 ")
    assert sorted(launch("echo", "ran")[1].splitlines()) == ["[0]<stdout>:ran", "[1]<stdout>:ran"]
    args = launcher.parse_args(["true"])
    assert (args.num_proc, args.hosts) == (2, "localhost:2")
    assert launcher.parse_args(["-np", "1", "true"]).num_proc == 1
    args = launcher.parse_args(["-np", "1", "-H", "h1:3", "true"])
    assert (args.num_proc, args.hosts) == (1, "h1:3")
    with pytest.raises(ValueError, match="-np N"):
        launcher.parse_args(["-H", "h1:3", "true"])
    monkeypatch.delenv("LSB_JOBID")
    with pytest.raises(ValueError, match="-np N"):
        launcher.parse_args(["true"])


def test_hosts_of_lsf():
    def of(text):
        return hosts.of_lsf({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": text})

    assert of("h1 4 h2.x 12") == [("h1", 4), ("h2.x", 12)] and of("") == []
    for bad in ("h1", "h1 x", "-o 2", "h1 4 h2"):
        with pytest.raises(ValueError, match="LSB_MCPU_HOSTS=.*expected host slots"):
            of(bad)


# The pages

def test_the_page_has_every_flag_and_its_variable():
    page = (ROOT / "docs" / "lightccrun.md").read_text()
    section = page[page.index("## Flags of lightccrun"):]
    rows = [line for line in section[:section.index("\n## ")].splitlines() if line.startswith("| `")]
    in_page = [name for row in rows for name in re.findall(r"`(--?[a-z][\w-]*|-H)", row.split(" | ")[0])]
    assert sorted(in_page) == sorted(set(launcher.parser()._option_string_actions) - {"-h", "--help"})
    for setting in SETTINGS:
        flag = setting.flag if isinstance(setting, Value) else setting.on
        (row,) = [row for row in rows if re.search(rf"`{flag}\b(?!-)", row.split(" | ")[0])]
        assert f"`{setting.variable}`" in row and (not setting.key or f"`{setting.key}`" in row), row


def test_the_page_of_knobs_has_every_variable_of_horovod():
    known = set(re.findall(r"HOROVOD_\w+", (ROOT / "docs" / "knobs.md").read_text()))
    assert {entry["name"] for entry in MANIFEST["environment"]} - known == set()


REPORTED = {"HOROVOD_SPARK_WORK_DIR", "HOROVOD_SPARK_PYTHONPATH",
            "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT",
            "HOROVOD_CYCLE_TIME", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "HOROVOD_THREAD_AFFINITY", "HOROVOD_GLOO_TIMEOUT_SECONDS", "HOROVOD_MPI_THREADS_DISABLE"}


def test_variables_without_effect_are_reported_by_rank_0_once():
    code = "import lightcc.numpy as hvd; hvd.init(); hvd.shutdown(); hvd.init(); hvd.shutdown()"
    others = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0", "HOROVOD_HIERARCHICAL_ALLGATHER": "1",
              "HOROVOD_GPU_OPERATIONS": "NCCL"}
    variables = {**dict.fromkeys(REPORTED, "1"), **others}
    code, out, err = start("-np", 2, sys.executable, "-c", code, **variables).finish()
    said = re.findall(r"(HOROVOD_\w+)=\S+ has no effect in this version: ", err)
    assert code == 0 and sorted(said) == sorted(REPORTED), err


VARIABLE = re.compile(r"""["'](?!LIGHTCC_TEST_)((?:HOROVOD|LIGHTCC|LIGHT|HARP)_[A-Z0-9_]+)["'=]""")
TABLES = [ROOT / "csrc" / "base" / name for name in ("config.cc", "ignored_knobs.h", "known_variables.cc")]


def variables_in(paths):
    return {name for path in paths for name in VARIABLE.findall(path.read_text())}


def test_every_variable_that_is_read_or_set_is_known_and_no_other():
    """Else rank 0 would say of it that nobody knows it (csrc/base/known_variables.h)."""
    sources = [path for folder in ("csrc", "harp_plugin", "lightcc") for path in (ROOT / folder).rglob("*")
               if path.suffix in {".cc", ".h", ".py"} and path not in TABLES]
    used = variables_in([*sources, ROOT / "setup.py"])
    assert used - variables_in(TABLES) == set(), "add them to kKnobs of config.cc, or to kOthers of known_variables.cc"
    others = set(VARIABLE.findall(re.search(r"kOthers\[\] = \{(.*?)\};", TABLES[2].read_text(), re.DOTALL)[1]))
    assert others - used == set(), "nobody reads them any more"
    horovods = {entry["name"] for entry in MANIFEST["environment"]}
    assert horovods - variables_in(TABLES) == set()


def test_unknown_variables_are_told_by_rank_0_once_with_the_nearest_name():
    code = "import lightcc.numpy as hvd; hvd.init(); hvd.shutdown(); hvd.init(); hvd.shutdown()"
    code, out, err = start("-np", 2, sys.executable, "-c", code, HOROVOD_CYCLETIME="1", LIGHTCC_TYPO="1",
                           HOROVOD_WITH_MPI="1").finish()
    said = re.findall(r"(\w+) is set, but lightcc knows no variable of that name: (.*)", err)
    assert (code, said) == (0, [("HOROVOD_CYCLETIME", "did you mean HOROVOD_CYCLE_TIME?"),
                                ("LIGHTCC_TYPO", "docs/knobs.md lists those that it reads")]), err
