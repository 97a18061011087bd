"""Which device: from the local rank and what CUDA shows this process.

The pure part maps (local rank, visible entries) to an index *among the visible devices*, which is
what torch wants: with CUDA_VISIBLE_DEVICES=2, device 0 is the GPU that nvidia-smi calls 2.
CUDA_VISIBLE_DEVICES is never written: Slurm, the container or the user has set it for a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdist.errors import LaunchError


@dataclass(frozen=True)
class Choice:
    """index: None means the CPU. shared: other local ranks hold (or may hold) the same device."""

    index: int | None
    shared: bool
    reason: str


def list_visible(environ: Mapping[str, str], *, count: int) -> tuple[str, ...]:
    """Return the visible devices: entries of CUDA_VISIBLE_DEVICES, or 0…count-1 where it is unset.

    An entry may be an index, a GPU's UUID ("GPU-…") or a MIG instance ("MIG-…"); each counts as
    one. As in CUDA, the first entry that names no device ("-1", "NoDevFiles") ends the list, and
    the driver's `count` is the upper bound.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(str(index) for index in range(count))
    entries: list[str] = []
    for entry in (part.strip() for part in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return tuple(entries[:count])


def choose(
    local_rank: int, local_world_size: int, visible: Sequence[str], *, may_share: bool
) -> Choice:
    """Return the device of a local rank.

    (3, "2") → 0, because one visible device means that the launcher gave each task its own;
    (3, "0,1,2,3") → 3; (any, "") → the CPU. With fewer devices than local ranks, ranks share one
    if the backend can (`may_share`: mpi, gloo).

    Raises
    ------
    LaunchError
        Too few devices for a backend that needs one per rank (nccl).
    """
    seen = ",".join(visible)
    if not visible:
        if not may_share:
            raise _too_few(local_world_size, visible)
        return Choice(None, False, "no CUDA device is visible: CPU")
    if len(visible) >= local_world_size:
        return Choice(local_rank, False, f"local rank {local_rank} of the visible {seen}")
    if len(visible) == 1:
        # Either --gpus-per-task, or one GPU for all: only the ranks together can tell (see group).
        return Choice(0, True, f"the one visible device, {seen}")
    if not may_share:
        raise _too_few(local_world_size, visible)
    index = local_rank % len(visible)
    return Choice(index, True, f"{local_world_size} local ranks share the visible {seen}")


def _too_few(wanted: int, visible: Sequence[str]) -> LaunchError:
    return LaunchError(
        f"nccl wants a GPU for each of the {wanted} ranks on this node, but {len(visible)} are "
        f"visible ({','.join(visible) or 'none'}): ask for {wanted} (--gpus-per-node={wanted}), "
        "start the container with --nv, or use backend gloo or mpi"
    )


def look(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that torch can use in this process (imports torch)."""
    import torch

    return list_visible(environ, count=torch.cuda.device_count())


def name_hardware(index: int, visible: Sequence[str]) -> str:
    """Return what is the same for all processes that hold this device, and for no other device.

    That is the GPU's UUID (imports torch), as indices differ between processes. A MIG instance
    goes by its own name, because CUDA may report the UUID of the whole GPU for it.
    """
    if visible[index].startswith("MIG-"):
        return visible[index]
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)
