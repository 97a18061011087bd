"""The mpi backend on 2 and 4 real ranks. See the worker programs for the checks themselves."""

import re

import pytest

GONE_WITHIN = 10  # seconds, for every rank after one has failed


@pytest.mark.parametrize("ranks", [2, 4])
def test_values(passes, ranks):
    passes(ranks, "worker_values.py")


def test_values_on_three_ranks(passes):
    passes(
        3,
        "worker_values.py",
        "test_chunk_borders",
        "test_movement_of_every_size",
        "test_uneven",
        "test_half_precision_accumulates_in_float32",
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_by_the_library(passes, ranks):
    """What runs between nodes: MPI's own collectives."""
    passes(
        ranks,
        "worker_values.py",
        "test_all_reduce_every_dtype_and_op",
        "test_chunk_borders",
        "test_half_precision_accumulates_in_float32",
        "test_premul_sum",
        "test_uneven",
        "test_layouts",
        "test_async",
        env={"TORCH_MPI_ALGORITHM": "library"},
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups(passes, ranks):
    passes(ranks, "worker_groups.py")


@pytest.mark.parametrize("ranks", [2, 4])
def test_training(passes, ranks):
    passes(ranks, "worker_training.py")


@pytest.mark.slow
def test_more_than_2_gib(passes):
    passes(2, "worker_huge.py", timeout=900)


@pytest.mark.conformance
@pytest.mark.parametrize(("ranks", "least"), [(2, 80), (4, 75)])
def test_conformance(passes, ranks, least):
    """PyTorch's own suite for backends: no failure, and as many passes as were seen."""
    result = passes(ranks, "conformance.py", timeout=900)
    passed = re.search(r"passed (\d+), failed 0,", result.output)
    assert passed and int(passed.group(1)) >= least, result.output[-4000:]


@pytest.mark.gpu
def test_gpu(passes):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    passes(2, "worker_gpu.py")


# ---- the ends of a job -------------------------------------------------------------------------

FATAL = {
    "exception": "on purpose",
    "exception_while_others_compute": "on purpose",
    "sys_exit_3": "has exited",
    "sys_exit_3_while_others_compute": "exits with status 3",
    "os_exit": "",
    "sigkill": "",
    "sigkill_in_group": "",
}


@pytest.mark.parametrize("scenario", FATAL)
def test_one_rank_fails_and_all_are_gone(mpirun, scenario):
    result = mpirun(2, "worker_failures.py", scenario, timeout=60)
    assert result.status != 0, result.output
    assert FATAL[scenario] in result.output
    left = float(re.search(r"leaving at ([\d.]+)", result.output).group(1))
    assert result.ended - left < GONE_WITHIN, result.output


@pytest.mark.parametrize(
    ("scenario", "status"),
    [
        ("sys_exit_0", 0),
        ("sys_exit_0_at_different_times", 0),
        ("exit_without_destroy_with_work_in_flight", 0),
        ("sys_exit_3_on_all", 3),
        ("preempted_after_error", 0),
    ],
)
def test_all_ranks_end(mpirun, scenario, status):
    result = mpirun(2, "worker_failures.py", scenario, timeout=60)
    assert result.status == status, result.output
    if scenario == "sys_exit_0_at_different_times":
        assert "rank 1 has finished" in result.output


@pytest.mark.parametrize(
    "scenario",
    [
        "timeout",
        "timeout_large",
        "timeout_p2p",
        "timeout_of_one_call",
        "timeout_of_new_group",
        "left_group",
        "abort_group",
        "truncated",
    ],
)
def test_error_can_be_caught(passes, scenario):
    result = passes(
        3 if scenario.startswith("timeout") else 2, "worker_failures.py", scenario, timeout=90
    )
    assert result.output.count("caught") >= 2, result.output


def test_uncaught_timeout_ends_the_job(mpirun):
    result = mpirun(2, "worker_failures.py", "timeout_uncaught", timeout=50)
    assert result.status != 0
    assert "ranks not yet arrived: [1]" in result.output


@pytest.mark.parametrize("ranks", [2, 3])
def test_debug_detail_names_both_sides(passes, ranks):
    passes(ranks, "worker_failures.py", "debug_detail", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


# ---- DETAIL does not change values -------------------------------------------------------------


def test_values_in_debug_mode(passes):
    passes(
        2,
        "worker_values.py",
        "test_uneven",
        "test_layouts",
        "test_async",
        "test_coalesced",
        "test_objects",
        env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    )
