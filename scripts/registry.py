#!/usr/bin/env python3
"""Bring an image here (`make pull IMAGE_URI=…`) without ever harming the one that is there.

IMAGE_URI: a file's path, file://PATH, oras://REGISTRY/NAME:TAG, docker://…, https://….
Standard library only, Python 3.8 or newer: it runs on login nodes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

from imagebuild.content import sha256_of
from imagebuild.diagnosis import explain
from imagebuild.preflight import find_runtime
from imagebuild.process import (
    BuildError,
    Workspace,
    catch_signals,
    error_lines,
    hold_lock,
    supervised,
    temporary_directory,
)
from imagebuild.sif import check_target, publish, read_labels
from options import Parser

ROOT = Path(__file__).resolve().parent.parent
# Remotes that answer no more, or that Apptainer has no default for.
DEAD = {
    "shub": "Singularity Hub closed in 2021",
    "library": "Apptainer has no default library remote",
}


def pull(uri: str, output: Path, sha256: Optional[str]) -> None:
    """Fetch the image to a temporary name, check it, then move it into place.

    Raises BuildError where any of this fails; what was at `output` before is then still there.
    """
    scheme, _, path = uri.rpartition("://")
    if scheme in DEAD:
        raise BuildError(f"{uri}: {DEAD[scheme]}; wanted a file, oras://, docker:// or https://")
    if scheme not in ("", "file", "oras", "docker", "https"):
        raise BuildError(
            f"{uri}: unknown scheme {scheme}; wanted a file, oras://, docker:// or https://"
        )
    if sha256 and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise BuildError(f"SHA256={sha256}: wanted 64 hexadecimal digits, as sha256sum prints them")
    if find_runtime() is None:
        raise BuildError("no apptainer or singularity in PATH: run `make setup`")
    check_target(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(
        output.with_name(f".{output.name}.lock"), f"another build or pull of {output.name}"
    ):
        part = output.with_name(f".{output.name}.pull")
        try:
            if scheme in ("", "file"):
                copy_file(Path(path), part)
            else:
                fetch(uri, part)
            verify(uri, part, sha256)
            publish(part, output)
        finally:
            if part.exists():
                part.unlink()


def copy_file(source: Path, target: Path) -> None:
    if not source.is_file():
        raise BuildError(f"IMAGE_URI={source}: no such file")
    shutil.copyfile(source, target)


def fetch(uri: str, target: Path) -> None:
    """`apptainer pull`; plain HTTP is allowed for a registry on this very host only."""
    loopback = re.match(r"\w+://(localhost|127\.[\d.]+|\[::1\])[:/]", uri)
    command = [
        find_runtime() or "apptainer",
        "pull",
        "--force",
        "--disable-cache",
        *(["--no-https"] if loopback else []),
        str(target),
        uri,
    ]
    # Downloads lie in a workspace, else a pull that is killed leaves gigabytes in TMPDIR for ever.
    with Workspace(temporary_directory()) as work:
        env = {**os.environ, "APPTAINER_TMPDIR": str(work.path)}
        with supervised(command, stderr=subprocess.PIPE, env=env) as child:
            _, errors = child.communicate()
    if child.returncode != 0:
        raise BuildError(f"{uri}: {explain(errors.splitlines())}")


def verify(uri: str, image: Path, sha256: Optional[str]) -> None:
    """The checksum, where one was given; a whole SIF that the runtime can read, in any case."""
    found = sha256_of(image)
    print(f"sha256 {found}")
    if sha256 and found != sha256.lower():
        raise BuildError(f"{uri}: sha256 is {found}, wanted {sha256}")
    labels = read_labels(image)
    if not labels:
        raise BuildError(f"{uri}: not a whole image: fetch it again")
    print(
        ", ".join(f"{key} {labels[key]}" for key in ("flavour", "version.torch") if key in labels)
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = Parser(prog="registry.py", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    command = verbs.add_parser("pull", help="fetch an image")
    command.add_argument("uri")
    command.add_argument("--out", type=Path, default=ROOT / "build/Pytorch_DL_HPC-cpu.sif")
    command.add_argument("--sha256", help="refuse any other file")
    given = parser.parse_args(arguments)
    catch_signals()
    try:
        if not given.uri:
            raise BuildError("IMAGE_URI is empty; wanted a file, oras://, docker:// or https://")
        pull(given.uri, given.out.absolute(), given.sha256)
        print(f"pulled {given.out}")
    except (BuildError, OSError) as error:
        for line in error_lines(error):
            print(f"pull: error: {line}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pull: stopped; nothing was changed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
