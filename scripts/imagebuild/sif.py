"""Read a SIF's labels; put a finished one into place."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Dict

from . import preflight


def read_labels(image: Path) -> Dict[str, str]:
    """The image's labels; none where there is no image, or no whole one."""
    runtime = preflight.find_runtime()
    if runtime is None or not image.is_file():
        return {}
    done = subprocess.run(
        [runtime, "inspect", "--json", "--labels", str(image)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return {}
    attributes = json.loads(done.stdout)["data"]["attributes"]
    return dict(attributes.get("labels") or {})


def publish(finished: Path, target: Path) -> None:
    """Move a file to its place so that the place never holds a part of it.

    The temporary name is beside the target (rename(2) is atomic within one file system only),
    and the bytes are on the disk before the name is.
    """
    temporary = target.with_name(f".{target.name}.part")
    try:
        shutil.move(str(finished), str(temporary))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        if temporary.exists():
            temporary.unlink()
