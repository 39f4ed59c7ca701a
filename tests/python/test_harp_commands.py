"""What pip installs of HARP beside NCCL's plugin: its programs as commands, and what a program in C needs to use it."""
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import lightcc

PACKAGE = Path(lightcc.__file__).parent
TIMEOUT_S = 120
PROGRAM = """
#include <stdio.h>
#include <harp.h>
int main(void) {
  harp_options options = {.size = sizeof options, .port = "shm"};
  harp_context* context = NULL;
  if (harp_open(&options, &context) != HARP_OK) return puts(harp_error()), 1;
  harp_close_context(context);
  return puts("opened"), 0;
}
"""


@pytest.mark.parametrize("name", ["harpd", "harp-stat", "harp-bench"])
def test_a_program_is_a_command(name):
    command = Path(sysconfig.get_path("scripts"), name)
    assert command.read_bytes()[:4] == b"\x7fELF", f"{command} starts something else first"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and name in done.stdout and not done.stderr, done


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_a_program_in_c_is_built_with_what_lies_in_the_package(tmp_path):
    source = tmp_path / "open.c"
    source.write_text(PROGRAM)
    subprocess.run(["cc", source, "-o", tmp_path / "open", f"-I{PACKAGE}/include", f"-L{PACKAGE}", "-lharp",
                    f"-Wl,-rpath,{PACKAGE}"], check=True, timeout=TIMEOUT_S)
    done = subprocess.run([tmp_path / "open"], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "opened\n"), done


def test_the_unit_for_systemd_starts_harpd_with_its_limits():
    lines = (PACKAGE / "share" / "harpd.service").read_text().splitlines()
    assert "LimitMEMLOCK=infinity" in lines and any(line.startswith("CapabilityBoundingSet=") for line in lines)
    assert any(line.startswith("ExecStart=") and line.endswith("/harpd") for line in lines)
