"""SIF files of a few kilobytes, written by hand: enough for `is_whole` and the fake apptainer.

As in a real image the labels come first and the file system last, so that a cut file still shows
its labels.
"""

import json
import struct
from pathlib import Path

DATA = 8192  # where the labels are; behind header and descriptors
FILE_SYSTEM = 4096  # bytes of the stand-in for the squashfs


def write_sif(path, labels):
    """A whole SIF with these labels."""
    text = json.dumps(labels).encode()
    objects = [(DATA, len(text)), (2 * DATA, FILE_SYSTEM)]
    descriptors = b"".join(
        struct.pack("<i?IIIqqq", 0x4005, True, number, 1, 0, offset, size, size).ljust(585, b"\0")
        for number, (offset, size) in enumerate(objects, start=1)
    )
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", b"01\0", b"02\0",
        b"\0" * 16, 0, 0, 0, len(objects), 128, len(descriptors), DATA, DATA + FILE_SYSTEM,
    )  # fmt: skip
    content = (header + descriptors).ljust(DATA, b"\0") + text
    Path(path).write_bytes(content.ljust(2 * DATA, b"\0") + b"\1" * FILE_SYSTEM)


def labels_of(path):
    """What `write_sif` wrote, also of a cut file; None where it is no SIF at all."""
    content = Path(path).read_bytes()
    if content[32:41] != b"SIF_MAGIC":
        return None
    return json.loads(content[DATA : 2 * DATA].rstrip(b"\0"))
