"""What a rank knows after `hpcdist.init`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Who this rank is, who its peers are, and what it computes on."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    host: str
    hosts: tuple[str, ...]  # one per node, in the order of node_rank
    device: torch.device
    backend: str
    launcher: str
    evidence: tuple[tuple[str, str], ...] = field(repr=False)  # what was decided, and by what
    _leave: Callable[[], None] = field(repr=False, compare=False)
    _drop: Callable[[], None] = field(repr=False, compare=False)

    def explain(self) -> str:
        """Return the decisions and the evidence for each, one line each."""
        width = max(len(name) for name, _ in self.evidence)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.evidence)

    def close(self) -> None:
        """Leave the process group in order. A second call does nothing."""
        self._leave()

    def abandon(self) -> None:
        """Drop the process group without waiting for anybody, because this rank has failed."""
        self._drop()
