"""The examples, run as a user runs them."""
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHERS = {
    "lightccrun": [sys.executable, "-m", "lightcc.runner", "-np", "2"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"],
    "plain": [],
}
STEPS = 12
DEADLINE_S = 400


def digits(launcher, folder, *arguments):
    command = [*LAUNCHERS[launcher], sys.executable, str(EXAMPLES / "pytorch_digits.py"), "--output", str(folder)]
    return warm.run([*command, *arguments], DEADLINE_S)


def expect_success(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def expect_short_run(launcher, ranks, folder):
    out = expect_success(digits(launcher, folder, "--steps", str(STEPS)))
    run = json.loads((folder / "run.json").read_text())
    assert run["ranks"] == ranks
    assert len(run["losses"]) == STEPS
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    for line in ("test accuracy", "images/s", "communication", "collectives"):
        assert line in out


@pytest.mark.slow
def test_digits_starts_under_torchrun(tmp_path):
    expect_short_run("torchrun", 2, tmp_path)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A short run with two ranks that lightccrun has started; its folder."""
    folder = tmp_path_factory.mktemp("digits")
    expect_short_run("lightccrun", 2, folder)
    return folder


def test_digits_on_one_rank_sees_the_same_losses_as_on_two(two_ranks):
    out = expect_success(digits("plain", two_ranks, "--reference"))
    found = re.search(rf"2 rank\(s\) against 1: .* losses of {STEPS} steps differ by at most (\S+) .* bound (\S+)", out)
    assert found, out
    assert float(found[1]) <= float(found[2]) <= 1e-4
    assert json.loads((two_ranks / "reference.json").read_text())["ranks"] == 1
    assert (two_ranks / "reference.png").read_bytes().startswith(b"\x89PNG")


def test_digits_reference_fails_when_one_loss_differs(two_ranks, tmp_path):
    run = json.loads((two_ranks / "run.json").read_text())
    run["losses"][STEPS // 2] *= 1.001
    (tmp_path / "run.json").write_text(json.dumps(run))
    done = digits("plain", tmp_path, "--reference")
    assert done.returncode == 1
    assert "DIFFERENT" in done.stdout and f"(step {STEPS // 2 + 1})" in done.stdout


def test_digits_learns_to_read(tmp_path):
    expect_success(digits("lightccrun", tmp_path, "--epochs", "10"))
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["accuracies"][-1][1] > 0.95


@pytest.mark.parametrize("launcher, ranks, flags", [
    ("lightccrun", 2, ["--fp16-allreduce"]), ("torchrun", 2, ["--model", "mlp", "--use-adasum"]),
    ("plain", 1, ["--model", "mlp"])])
def test_synthetic_benchmark(launcher, ranks, flags):
    out = expect_success(warm.run(
        [*LAUNCHERS[launcher], sys.executable, str(EXAMPLES / "pytorch_synthetic_benchmark.py"), "--batch-size", "2",
         "--num-warmup-batches", "1", "--num-batches-per-iter", "2", "--num-iters", "3", "--no-cuda", *flags],
        DEADLINE_S))
    assert len(re.findall(r"Iter #\d: [\d.]+ img/sec per CPU", out)) == 3
    each, total = (float(x) for x in re.search(
        rf"Img/sec per CPU: ([\d.]+) \+-[\d.]+\n.*Total img/sec on {ranks} CPU\(s\): ([\d.]+) \+-[\d.]+", out).groups())
    assert total == pytest.approx(ranks * each, abs=ranks)


def test_synthetic_benchmark_names_a_model_that_is_not_there():
    done = warm.run([sys.executable, EXAMPLES / "pytorch_synthetic_benchmark.py", "--model", "resnet7"], DEADLINE_S)
    assert done.returncode == 1 and "--model resnet7: " in done.stderr


@pytest.mark.slow
def test_imagenet_goes_on_from_its_checkpoint(tmp_path):
    """In the warm-up of five epochs the rate rises from that of one rank to that of two."""
    found = {}
    for epochs in ("1", "2"):
        out = expect_success(warm.run(
            [*LAUNCHERS["lightccrun"], sys.executable, EXAMPLES / "pytorch_imagenet_resnet50.py", "--synthetic", "4",
             "--image-size", "32", "--batch-size", "2", "--batches-per-allreduce", "2", "--val-batch-size", "2",
             "--epochs", epochs, "--checkpoint-folder", tmp_path, "--no-cuda"], DEADLINE_S))
        found[epochs] = re.findall(r"epoch (\d): loss (\d+\.\d+), .* rate (\S+)", out)
    (first, loss, rate), = found["1"]
    (second, later, risen), = found["2"]  # the first one is not repeated
    assert (first, rate, second, risen) == ("1", "0.0250", "2", "0.0300")
    assert float(later) < float(loss) < 8
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["epoch-001.pt", "epoch-002.pt"]


def test_mixed_precision(tmp_path):
    """With so few steps the policy has little patience."""
    out = expect_success(warm.run(
        [*LAUNCHERS["lightccrun"], sys.executable, EXAMPLES / "pytorch_amp.py", "--steps", "40", "--output", tmp_path],
        DEADLINE_S))
    assert len(re.findall(r"seed 0, \w+ *: final loss .* of the steps in bfloat16", out)) == 3
    runs = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert {name: {*run[0]["levels"]} for name, run in runs.items()} == {
        "full": {"float32"}, "bfloat16": {"bfloat16"}, "switching": {"bfloat16", "float32"}}
    assert all(len(run[0]["losses"]) == 40 and run[0]["losses"][-1] < run[0]["losses"][0] for run in runs.values())
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "no picture: pip install matplotlib" in out


def test_mixed_precision_worker_of_the_benchmark():
    worker = EXAMPLES.parent / "bench" / "amp_worker.py"
    out = expect_success(warm.run([*LAUNCHERS["lightccrun"], sys.executable, worker, "agreement", "50"], DEADLINE_S))
    found = json.loads(out.partition(":found ")[2].splitlines()[0])
    assert found["one level"] and found["weights equal"] and found["switches"] > 10
