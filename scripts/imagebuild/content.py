"""What goes into an image, and the key that says whether it changed."""

import hashlib
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Dict, Iterator, Mapping, NamedTuple

from .process import BuildError

IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build", ".*", "*.so", "*.o")


COMPILED = "payload/torch_mpi/"


class Inputs(NamedTuple):
    """The tree's own inputs of one flavour, by path relative to the root."""

    root: Path
    flavour: str
    version: str
    dependencies: Dict[str, bytes]
    payload: Dict[str, bytes]


def flavours(root: Path) -> Dict[str, Path]:
    """The flavours that can be built: each has a lock FLAVOUR.txt and a torch-FLAVOUR.txt."""
    locks = root / "payload" / "requirements"
    return {
        path.stem[len("torch-") :]: path
        for path in sorted(locks.glob("torch-*.txt"))
        if (locks / path.name[len("torch-") :]).is_file()
    }


def read_inputs(root: Path, flavour: str) -> Inputs:
    """Read what an image is made of; raises BuildError for a flavour that the tree lacks."""
    known = flavours(root)
    if flavour not in known:
        raise BuildError(f"FLAVOUR={flavour} is unknown; wanted one of: {' '.join(known)}")
    payload = dict(_files(root / "payload", root))
    locks = ("build.txt", f"{flavour}.txt", f"torch-{flavour}.txt", f"torchvision-{flavour}.txt")
    names = [f"payload/requirements/{name}" for name in locks]
    dependencies = {name: payload[name] for name in names if name in payload}
    # Compiled code belongs to the layer below the payload: a change elsewhere compiles nothing.
    dependencies.update((name, payload[name]) for name in payload if name.startswith(COMPILED))
    dependencies["Singularity.def"] = (root / "Singularity.def").read_bytes()
    project = payload.get("payload/pyproject.toml", b"")
    found = re.search(r'^version = "(.+)"', project.decode(errors="replace"), re.M)
    if not found:
        raise BuildError('payload/pyproject.toml has no line `version = "…"`')
    return Inputs(root, flavour, found.group(1), dependencies, payload)


def _files(directory: Path, root: Path) -> "Iterator[tuple[str, bytes]]":
    for parent, folders, names in os.walk(str(directory), onerror=_refuse):
        skipped = IGNORED(parent, folders + names)
        # A link to a directory is among the folders, but not walked into: it must not be lost.
        links = {name for name in folders if Path(parent, name).is_symlink()}
        folders[:] = sorted(set(folders) - skipped - links)
        for name in sorted({*names, *links} - skipped):
            path = Path(parent, name)
            if not path.is_file():
                raise BuildError(f"{path}: wanted a regular file or a link to one; remove it")
            yield str(path.relative_to(root)), path.read_bytes()


def _refuse(error: OSError) -> None:
    raise error


def layer_key(inputs: Inputs, choices: Mapping[str, str]) -> str:
    """The key of the dependencies: definition, locks, and the choices as the user made them.

    `auto` stays `auto` in the key, so that a network that comes and goes rebuilds nothing.
    """
    return _digest(
        inputs.dependencies, {**choices, "flavour": inputs.flavour, "machine": platform.machine()}
    )


def image_key(inputs: Inputs, choices: Mapping[str, str]) -> str:
    """The key of the whole image: the dependencies' and the payload's content."""
    return _digest(inputs.payload, {"dependencies": layer_key(inputs, choices)})


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, which may be larger than the memory, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _digest(files: Mapping[str, bytes], choices: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(os.fsencode(name) + f"\0{len(content)}\0".encode() + content)
    for name, value in sorted(choices.items()):
        digest.update(f"{name}={value}\0".encode())
    return digest.hexdigest()[:16]


def stage(inputs: Inputs, directory: Path) -> None:
    """Write the inputs as they were read: an edit during the build cannot get into the image.

    Everyone may read them in the image, whatever the umask of the one who builds it.
    """
    for name, content in {**inputs.payload, **inputs.dependencies}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)
    for parent, _, _ in os.walk(str(directory / "payload")):
        Path(parent).chmod(0o755)
