"""lightccrun --config-file: what a file sets, what wins over it, and what is wrong with one."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import DEADLINE_S, environment, launch, start
from lightcc.runner import config_file
from lightcc.runner import launch as launcher
from lightcc.runner.flags import SETTINGS

MANIFEST = json.loads((Path(__file__).parents[1] / "data" / "horovod_api.json").read_text())
FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 2048
  hierarchical_allreduce: true
  hierarchical_allgather: no
  torus_allreduce: false
autotune:
  enabled: yes
  log_file: log.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: t.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
"""
VALUES = {
    "HOROVOD_FUSION_THRESHOLD": str(32 << 20), "HOROVOD_CYCLE_TIME": "5.0", "HOROVOD_CACHE_CAPACITY": "2048",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLGATHER": "0", "HOROVOD_TORUS_ALLREDUCE": "0",
    "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9", "HOROVOD_TIMELINE": "t.json",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240", "HOROVOD_MPI_THREADS_DISABLE": "1", "HOROVOD_NUM_NCCL_STREAMS": "2",
    "HOROVOD_THREAD_AFFINITY": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "HOROVOD_LOG_LEVEL": "INFO",
    "HOROVOD_LOG_HIDE_TIME": "1",
}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "settings.yaml"


def test_a_file_has_the_keys_of_horovodrun():
    known = {(entry.key.split(".")[0], entry.key.split(".")[1]) for entry in SETTINGS if entry.key}
    schema = MANIFEST["config_file_schema"]
    assert known == {(section, name) for section, names in schema.items() if section != "controller" for name in names}
    assert schema["controller"] == "|".join(config_file.CONTROLLERS)


def test_a_file_sets_variables_and_flags_win_wherever_they_stand(file):
    file.write_text(FILE)
    variables, err = environment("--config-file", file)
    assert err == "" and {name: variables.get(name) for name in VALUES} == VALUES
    assert set(VALUES) == {entry.variable for entry in SETTINGS if entry.key}
    for given in (["--config-file", file, "--cache-capacity", 7, "--stall-check", "--no-autotune"],
                  ["--cache-capacity", 7, "--stall-check", "--no-autotune", "--config-file", file]):
        settings = launcher.parse_args([*map(str, given), "-np", "1", "true"]).settings
        assert settings == {**VALUES, "HOROVOD_CACHE_CAPACITY": "7", "HOROVOD_STALL_CHECK_DISABLE": "0",
                            "HOROVOD_AUTOTUNE": "0"}


def test_a_file_may_choose_the_controller(file):
    file.write_text("controller: mpi\n")
    _, err = environment("--config-file", file)
    assert re.fullmatch(rf"lightccrun: controller: mpi in {file} has no effect: .*\n", err), err
    assert launch("-np", 1, "--gloo", "--config-file", file, "true") == (0, "", "")


@pytest.mark.parametrize("text", ["", "params:\n", "params:\n  cycle_time_ms:\n", "controller:\n"])
def test_what_is_empty_sets_nothing(file, text):
    file.write_text(text)
    assert config_file.load(str(file)) == ({}, None)


@pytest.mark.parametrize("text, message", [
    ("param: {}", "unknown key 'param'; there are controller, params, autotune, timeline, stall_check, "
                  "library_options, logging"),
    ("verbose: true", "unknown key 'verbose'; there are controller, "),
    ("timeline: {file: t.json}", "unknown key 'timeline.file'; timeline has filename, mark_cycles"),
    ("params: {1: 2}", "unknown key 'params.1'; params has fusion_threshold_mb, "),
    ("params: 3", "params is 3; expected a mapping with the keys fusion_threshold_mb, cycle_time_ms, "),
    ("- params", "it holds ['params']; expected a mapping with the keys controller, params, "),
    ("controller: jsrun", "controller is 'jsrun'; expected gloo or mpi"),
    ("params: {cache_capacity: many}", "params.cache_capacity is 'many'; expected a whole number, 0 or more"),
    ("params: {cache_capacity: '5'}", "params.cache_capacity is '5'; expected a whole number, 0 or more"),
    ("params: {cache_capacity: true}", "params.cache_capacity is True; expected a whole number, 0 or more"),
    ("params: {cache_capacity: -1}", "params.cache_capacity is -1; expected a whole number, 0 or more"),
    ("params: {fusion_threshold_mb: 1.5}", "params.fusion_threshold_mb is 1.5; expected a whole number of MB, 0 or "),
    ("params: {cycle_time_ms: .inf}", "params.cycle_time_ms is inf; expected a number, 0 or more"),
    ("params: {torus_allreduce: 1}", "params.torus_allreduce is 1; expected true or false"),
    ("autotune: {gaussian_process_noise: 2}", "autotune.gaussian_process_noise is 2; expected a number from 0 to 1"),
    ("timeline: {filename: [a]}", "timeline.filename is ['a']; expected text"),
    ("logging: {level: loud}", "logging.level is 'loud'; expected one of TRACE, DEBUG, INFO, WARNING, ERROR, FATAL"),
    ("logging: [", "this is no YAML: while parsing"),
])
def test_a_file_that_is_wrong_is_a_usage_error_with_file_and_key(file, text, message, capfd):
    file.write_text(text)
    assert launcher.main(["-np", "1", "--config-file", str(file), "true"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"lightccrun: {file}: {message}")


def test_a_file_that_is_not_there(file, capfd):
    assert launcher.main(["-np", "1", "--config-file", str(file), "true"]) == 2
    assert capfd.readouterr().err == f"lightccrun: --config-file {file}: No such file or directory\n"


def test_yaml_is_needed_for_a_file_only(file, tmp_path):
    (tmp_path / "yaml.py").write_text("raise ImportError('none here')")
    file.write_text(FILE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    assert start("-np", 1, "true", PYTHONPATH=path).finish() == (0, "", "")
    code, _, err = start("-np", 1, "--config-file", file, "true", PYTHONPATH=path).finish()
    assert code == 2 and "needs PyYAML (none here); pip install PyYAML" in err


def test_the_launcher_reads_no_yaml_to_start():
    code = "import lightcc.runner.launch as l, sys; l.parse_args(['-np', '1', 'x']); print('yaml' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=DEADLINE_S) == b"False\n"
