"""The checks of test_collectives.py with tensors of GPUs, which are the double's (gpu_double.py)."""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import pytest
from gpu_fixtures import boolean, case, device, double, framework, handled, job, no_faults, number  # noqa: F401
from test_collectives import (  # noqa: F401
    check_allgather,
    check_allreduce,
    check_allreduce_of_bool,
    check_alltoall_in_equal_parts,
    check_alltoall_with_splits,
    check_barrier,
    check_broadcast,
    check_default_is_average,
    check_factors,
    check_from_several_threads,
    check_mixed_dtypes_in_one_group,
    check_names_are_used_again,
    check_nan_and_infinity_are_not_hidden,
    check_poll_and_synchronize,
    check_poll_does_not_claim_what_cannot_be,
    check_reducescatter,
    check_results_are_identical_in_bits,
    check_same_name_in_different_kinds,
    check_sizes,
    check_submitted_in_another_order_on_each_rank,
    check_synchronized_in_random_order,
)

import ranks


@pytest.mark.parametrize("np", {2}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)
