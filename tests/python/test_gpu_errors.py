"""The checks of calls that cannot be, of ranks that disagree and of ranks without data, with tensors of GPUs, which are
the double's (gpu_double.py)."""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import numpy as np
import pytest
from gpu_fixtures import boolean, case, device, double, framework, handled, job, no_faults, number  # noqa: F401
from test_adasum import check_ranks_that_disagree_hear_of_it  # noqa: F401
from test_disagreements import (  # noqa: F401
    check_disagreement,
    check_disagreement_of_other_kinds,
    check_every_rank_has_another_shape,
    check_number_of_tensors,
)
from test_errors import (  # noqa: F401
    check_allgather_of_a_scalar,
    check_bad_call,
    check_bad_call_in_place,
    check_name_in_flight,
    check_process_sets,
    check_reducescatter_with_adasum,
    check_shutdown_and_init,
    check_shutdown_with_operations_in_flight,
    check_splits_of_wrong_form,
    expect_works,
)
from test_join import (  # noqa: F401
    backwards,
    check_a_broadcast_from_a_rank_that_has_joined,
    check_at_random_times,
    check_movement,
    check_names_meet_again_afterwards,
    check_reductions,
    check_sizes,
    check_what_was_started_before_takes_part_and_is_finished,
)

import ranks
from lightcc.core.exceptions import HorovodInternalError

pytestmark = pytest.mark.torch_sizes


@pytest.mark.parametrize("np", {3}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# CPU and GPU

VERBS = {"allreduce": lambda hvd, x, name: hvd.allreduce(x, name=name),
         "allreduce in place": lambda hvd, x, name: hvd.allreduce_(x, name=name),
         "grouped_allreduce": lambda hvd, x, name: hvd.grouped_allreduce([x, x], name=name),
         "allgather": lambda hvd, x, name: hvd.allgather(x, name=name),
         "broadcast": lambda hvd, x, name: hvd.broadcast(x, 0, name=name),
         "alltoall": lambda hvd, x, name: hvd.alltoall(x, name=name),
         "reducescatter": lambda hvd, x, name: hvd.reducescatter(x, name=name),
         "a handle": lambda hvd, x, name: hvd.synchronize(hvd.allreduce_async(x, name=name))}


@pytest.mark.parametrize("verb", VERBS)
def check_ranks_on_different_devices_are_named(framework, verb):
    hvd = framework.hvd
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    values = np.arange(2.0 * hvd.size())
    on_gpu = framework.tensor(values, "float32")
    on_host = framework.on_host(values, "float32")
    for host_ranks in ([0], [hvd.size() - 1]):
        mine = on_host if hvd.rank() in host_ranks else on_gpu
        first, other = ("cpu", "cuda") if 0 in host_ranks else ("cuda", "cpu")
        named = f"on device: ranks? 0.* ha.* {first}, ranks? .*{hvd.size() - 1} ha.* {other}"
        with pytest.raises(HorovodInternalError, match=named):
            VERBS[verb](hvd, mine, "x")
        framework.expect(hvd.allreduce(on_gpu, name="x", op=hvd.Sum), values * hvd.size(), "float32")
        expect_works("x")


def check_a_list_on_different_devices_is_this_ranks_error(framework):
    hvd = framework.hvd
    x = framework.tensor(np.ones(4), "float32")
    host = framework.on_host(np.ones(4), "float32")
    there = type(framework)(framework.double, framework.device + 1).tensor(np.ones(4), "float32")
    for mixed in ([x, host], [host, x], [x, there]):
        for run in (*list(framework.forms("allreduce"))[2:], *list(framework.forms("allreduce", in_place=True))[2:],
                    *list(framework.forms("allgather"))[2:], *list(framework.forms("reducescatter"))[2:]):
            for kind in (ValueError, RuntimeError):  # Horovod's is the latter
                with pytest.raises(kind, match=f"not all on one device, but on (cpu, )?cuda:{framework.device}"):
                    run(mixed)
    framework.expect(hvd.allreduce(x, op=hvd.Sum), np.full(4, hvd.size()), "float32")
