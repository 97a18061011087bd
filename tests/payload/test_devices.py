"""Which device: (local rank, visible devices) in, index among the visible ones out."""

from __future__ import annotations

import os

import pytest
from hpcdist import LaunchError
from hpcdist.devices import choose, list_visible, name_hardware

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def pick(local_rank: int, text: str | None, *, ranks: int = 4, gpus: int = 8) -> int | None:
    """Return the index for a value of CUDA_VISIBLE_DEVICES on a node of 8 GPUs."""
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    return choose(local_rank, ranks, list_visible(environ, count=gpus), may_share=True).index


@pytest.mark.parametrize(
    ("local_rank", "text", "index"),
    [
        (3, "2", 0),  # the launcher gave each task its own
        (3, "0,1,2,3", 3),
        (1, "4,5,6,7", 1),  # an index among the visible devices, not the number of the GPU
        (3, None, 3),  # unset: all are visible
        (0, "", None),
        (0, "-1", None),
        (0, "NoDevFiles", None),  # what Slurm sets where a job has no GPUs
        (1, f"{UUID},{UUID[:-1]}7,1,2", 1),
        (3, MIG, 0),
        (1, f"{MIG},{MIG[:-1]}7,{MIG[:-1]}8,{MIG[:-1]}9", 1),
        (3, " 0, 1, 2, 3", 3),
        (3, "0,1", 1),  # shared, round robin
    ],
)
def test_index(local_rank: int, text: str | None, index: int | None) -> None:
    assert pick(local_rank, text) == index


def test_the_list_ends_at_the_first_entry_that_is_no_device() -> None:
    assert list_visible({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, count=8) == ("1",)


def test_the_driver_has_the_last_word() -> None:
    assert list_visible({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, count=0) == ()
    assert list_visible({}, count=2) == ("0", "1")


def test_two_gpus_for_four_ranks() -> None:
    choices = [choose(rank, 4, ("0", "1"), may_share=True) for rank in range(4)]
    assert [choice.index for choice in choices] == [0, 1, 0, 1]
    assert all(choice.shared for choice in choices)
    assert "4 local ranks share the visible 0,1" in choices[0].reason


def test_enough_gpus_are_not_shared() -> None:
    assert not choose(1, 2, ("0", "1"), may_share=True).shared


@pytest.mark.parametrize("visible", [("0", "1"), ()])
def test_too_few_gpus_for_nccl_says_wanted_and_seen(visible: tuple[str, ...]) -> None:
    words = rf"each of the 4 ranks on this node, but {len(visible)} are visible"
    with pytest.raises(LaunchError, match=words):
        choose(1, 4, visible, may_share=False)


def test_one_visible_gpu_per_task_is_enough_for_nccl() -> None:
    assert choose(3, 4, ("0",), may_share=False).index == 0


def test_mig_instances_go_by_their_own_names() -> None:
    assert name_hardware(1, (f"{MIG}", f"{MIG[:-1]}7")) == f"{MIG[:-1]}7"


def test_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = dict(os.environ)
    choose(1, 2, list_visible(os.environ, count=2), may_share=False)
    assert dict(os.environ) == before
