"""The job of `make demo`: the examples on four local ranks in the image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.image


def demo(**variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/demo.sh"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_demo_sums_on_four_ranks() -> None:
    """Under mpirun and under torchrun: world size 4, the sum of 1…4."""
    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: sum 10 over 4 ranks on 1 node(s) (backend mpi)" in done.stdout
    assert "OK: sum 10 over 4 ranks on 1 node(s) (backend gloo)" in done.stdout
    assert "== done" in done.stdout


def test_demo_without_an_image_says_what_to_type() -> None:
    done = demo(IMAGE="/nowhere/x.sif")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == (
        "demo.sh: error: no image /nowhere/x.sif: run `make image` or `make pull IMAGE_URI=…`"
    )
