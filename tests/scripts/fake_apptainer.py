"""A stand-in for `apptainer build|inspect|pull`, run as a program; hosts.py installs it.

Every call is a line of JSON in $FAKE_LOG. $FAKE_APPTAINER chooses what happens in build and pull:
(nothing) a good image; slow: half an image, then a child that sleeps; fail: what a failed command
of %post prints; no-network: what a dead registry is answered with; page: a web page instead of
an image; full: the image fills the disk.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, os.environ["FAKE_MODULES"])
from sif_files import labels_of, write_sif  # noqa: E402


def inspect(image):
    try:
        labels = labels_of(image)
    except (OSError, ValueError):
        labels = None
    if labels is None:
        sys.exit(f"FATAL:   Failed to open image {image}: image format not recognized")
    print(json.dumps({"data": {"attributes": {"labels": labels}}, "type": "container"}))


def build(words):
    arguments = dict(words[at + 1].split("=", 1) for at, w in enumerate(words) if w == "--build-arg")
    labels = dict(labels_of(arguments["FROM"]) or {}) if arguments["BOOTSTRAP"] == "localimage" else {}
    key = "layer-key" if arguments["LAYER"] == "deps" else "content-key"
    labels.update({key: arguments["CONTENT_KEY"], "version.torchvision": arguments["TORCHVISION"]})
    binds = dict(words[at + 1].split(":", 1) for at, w in enumerate(words) if w == "--bind")
    context = next(source for source, target in binds.items() if target == "/mnt")
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps({"host.env": Path(context, "host.env").read_text()}) + "\n")
    print(f"==> {arguments['LAYER']} installs things", flush=True)
    write(words[-2], labels)
    print("INFO:    Creating SIF file...")


def write(target, labels):
    kind = os.environ.get("FAKE_APPTAINER", "")
    if kind == "slow":
        Path(target).write_bytes(b"half")
        subprocess.run(["sleep", "1000"])
    elif kind == "fail":
        print("some output\nE: Unable to fetch some archives\nFATAL:   While performing build: 100")
        sys.exit(255)
    elif kind == "no-network":
        print(
            "INFO:    Downloading oras\nFATAL:   While pulling image from oci registry: failed to get"
            f" checksum for {sys.argv[-1]}: dial tcp 127.0.0.1:1: connect: connection refused",
            file=sys.stderr,
        )
        sys.exit(255)
    elif kind == "page":
        Path(target).write_text("<html><title>Please log in</title></html>\n")
    elif kind == "full":
        with Path(target).open("wb") as file:
            while True:
                file.write(b"\0" * (1 << 20))
    else:
        write_sif(target, labels)


def main(words):
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps(words) + "\n")
    if words[0] == "inspect":
        inspect(words[-1])
    elif words[0] == "build":
        build(words)
    elif words[0] == "pull":
        source = re.sub(r"^\w+://\w+", "", words[-1])
        write(words[-2], {"flavour": "cpu", "version.torch": "2.13.0+cpu", "from": source})


if __name__ == "__main__":
    main(sys.argv[1:])
