"""A stand-in for `apptainer build|pull`, run as a program; hosts.py installs it, and `inspect`.

Every call is a line of JSON in $FAKE_LOG. $FAKE_APPTAINER chooses what happens in build and pull:
(nothing) a good image; slow: half an image, then a child that sleeps; fail: what a failed command
of %post prints; no-network: what a dead registry is answered with; page: a web page instead of
an image; full: the image fills the disk; gate: waits until the file $FAKE_GATE is there.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["FAKE_MODULES"])
from sif_files import labels_of, write_sif  # noqa: E402


def build(words):
    arguments = dict(
        words[at + 1].split("=", 1) for at, w in enumerate(words) if w == "--build-arg"
    )
    labels = (
        dict(labels_of(arguments["FROM"]) or {}) if arguments["BOOTSTRAP"] == "localimage" else {}
    )
    labels["content-key"] = arguments["CONTENT_KEY"]
    labels["version.torchvision"] = arguments["TORCHVISION"]
    binds = dict(words[at + 1].split(":", 1) for at, w in enumerate(words) if w == "--bind")
    context = next(source for source, target in binds.items() if target == "/mnt")
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps({"host.env": Path(context, "host.env").read_text()}) + "\n")
    print(f"==> {arguments['LAYER']} installs things", flush=True)
    write(words[-2], labels)
    print("INFO:    Creating SIF file...")


def write(target, labels):
    kind = os.environ.get("FAKE_APPTAINER", "")
    while kind == "gate" and not Path(os.environ["FAKE_GATE"]).exists():
        time.sleep(0.01)
    if kind == "slow":
        Path(target).write_bytes(b"half")
        Path(os.environ.get("APPTAINER_TMPDIR", os.environ["TMPDIR"]), "download").touch()
        os.spawnlp(os.P_WAIT, "sleep", "sleep", "1000")
    elif kind == "fail":
        print("some output\nE: Unable to fetch some archives\nFATAL:   While performing build")
        sys.exit(255)
    elif kind == "no-network":
        print("INFO:    Downloading oras image", file=sys.stderr)
        sys.exit("FATAL:   While pulling image: dial tcp 127.0.0.1:1: connect: connection refused")
    elif kind == "page":
        Path(target).write_text("<html><title>Please log in</title></html>\n")
    elif kind == "full":
        try:
            with Path(target).open("wb") as file:
                while True:
                    file.write(b"\0" * (1 << 20))
        except OSError as error:
            sys.exit(f"FATAL:   While creating squashfs: {error.strerror}")
    else:
        write_sif(target, labels)


def main(words):
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps(words) + "\n")
    if words[0] == "build":
        build(words)
    elif words[0] == "pull":
        write(words[-2], {"flavour": "cpu", "version.torch": "2.13.0+cpu"})


if __name__ == "__main__":
    main(sys.argv[1:])
