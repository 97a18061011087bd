#!/usr/bin/env python3
"""Measure what the container costs (`make measure`): its start, and `import torch` inside and bare.

Bare is the image's own /opt/venv, unpacked beside it and run by the host's Python, which must be of
the same version. Runs take turns, so that a busy moment hits all of them; the ratio is what counts.
Standard library only, Python 3.8 or newer.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List

from imagebuild.preflight import find_runtime
from imagebuild.process import remove_tree
from imagebuild.sif import read_labels

IMPORT = ["-c", "import torch"]


def seconds(command: List[str]) -> float:
    """Wall-clock seconds of a command that must succeed."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def bare_python(runtime: str, image: Path, place: Path, version: str) -> List[str]:
    """The image's virtual environment, unpacked, for the host's Python; empty where it has none."""
    name = ".".join(version.split(".")[:2])
    if not Path(f"/usr/bin/python{name}").exists():
        print(f"no /usr/bin/python{name} on this host: `import torch` bare is left out")
        return []
    copy = ["exec", "--bind", str(place), str(image), "cp", "-a", "/opt/venv", str(place)]
    subprocess.run([runtime, *copy], check=True)
    return [str(place / "venv/bin/python")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="measure.py", description=__doc__.splitlines()[0])
    parser.add_argument("image", type=Path)
    parser.add_argument("--runs", type=int, default=7, help="of each (default: %(default)s)")
    given = parser.parse_args()
    runtime = find_runtime()
    labels = read_labels(given.image)
    if runtime is None or not labels:
        print(
            f"measure: error: no Apptainer, or no image {given.image}: make image", file=sys.stderr
        )
        return 1
    place = Path(tempfile.mkdtemp(prefix="pytorch-dl-hpc-measure-"))
    try:
        container = [runtime, "exec", str(given.image)]
        commands = {
            "container start (exec true)": [*container, "true"],
            "import torch, container": [*container, "python", *IMPORT],
        }
        python = bare_python(runtime, given.image, place, labels["version.python"])
        if python:
            commands["import torch, bare"] = [*python, *IMPORT]
        for command in commands.values():  # the first run of each fills the page cache
            seconds(command)
        times: Dict[str, List[float]] = {name: [] for name in commands}
        for _ in range(given.runs):
            for name, command in commands.items():
                times[name].append(seconds(command))
    finally:
        remove_tree(place)
    report(times, given.image)
    return 0


def report(times: Dict[str, List[float]], image: Path) -> None:
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"{image}: {image.stat().st_size / 1e6:.0f} MB")
    print(f"{'':32}{'min':>8}{'median':>8}  seconds of {len(next(iter(times.values())))} warm runs")
    for name, values in times.items():
        print(f"{name:32}{min(values):8.3f}{statistics.median(values):8.3f}")
    if "import torch, bare" in times:
        pairs = zip(times["import torch, container"], times["import torch, bare"])
        ratio = statistics.median(inside / bare for inside, bare in pairs)
        print(f"{'import torch, container / bare':32}{'':8}{ratio:8.2f}")


if __name__ == "__main__":
    sys.exit(main())
