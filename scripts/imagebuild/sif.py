"""Read a SIF's labels; put a finished one into place."""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Dict

from . import preflight
from .process import BuildError

# github.com/apptainer/sif, pkg/sif: launch script, magic, version, architecture, id; then created,
# modified, free and total descriptors, their offset and size, the data's offset and size.
HEADER = struct.Struct("<32s10s3s3s16s8q")
# type, used, id, group, link, offset, size; the rest of a descriptor's 585 bytes is not needed.
DESCRIPTOR = struct.Struct("<i?IIIqq552x")
MAGIC = b"SIF_MAGIC\0"


def is_whole(image: Path) -> bool:
    """Whether the file is a SIF that reaches as far as its own header says.

    `apptainer inspect` reads the labels of a truncated image without complaint.
    """
    size = image.stat().st_size
    with image.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or HEADER.unpack(header)[1] != MAGIC:
            return False
        _, total, offset, _ = HEADER.unpack(header)[7:11]
        if total < 1 or offset < HEADER.size or offset + total * DESCRIPTOR.size > size:
            return False
        file.seek(offset)
        descriptors = DESCRIPTOR.iter_unpack(file.read(total * DESCRIPTOR.size))
        ends = [start + length for _, used, *_, start, length in descriptors if used]
    return bool(ends) and max(ends) <= size


def check_target(path: Path) -> None:
    """Refuse early a name that no image can be moved to."""
    if path.is_dir():
        raise BuildError(f"OUT={path} is a directory, wanted a file: OUT={path / 'image.sif'}")


def read_labels(image: Path) -> Dict[str, str]:
    """The image's labels; none where there is no image, or no whole one."""
    runtime = preflight.find_runtime()
    if runtime is None or not image.is_file() or not is_whole(image):
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
