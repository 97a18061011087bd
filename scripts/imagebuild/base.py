"""The Debian system under the image: from a Docker registry, or made with mmdebstrap."""

import http.client
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import List, Mapping, NamedTuple

from .content import sha256_of
from .diagnosis import explain
from .process import BuildError, Workspace, run_logged
from .sif import publish

DOCKER_REGISTRY = "https://registry-1.docker.io/v2/"
MAX_AGE_DAYS = 30  # an older base lacks security updates
DOCKER_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}


class Base(NamedTuple):
    """The two header lines of the definition."""

    bootstrap: str
    source: str


def choose(
    kind: str, suite: str, cache: Path, work: Workspace, variables: Mapping[str, str], refresh: bool
) -> Base:
    """The base for this host. `auto`: a base in the cache, else Docker Hub, else mmdebstrap."""
    tarball = cache / "base" / f"debian-{suite}-{platform.machine()}.tar"
    if kind == "docker" or (
        kind == "auto" and not is_fresh(tarball, refresh) and is_reachable(DOCKER_REGISTRY)
    ):
        return Base("docker", f"debian:{suite}-slim")
    if not is_fresh(tarball, refresh):
        make_tarball(suite, tarball, work, variables)
    return Base("docker-archive", str(tarball))


def is_fresh(tarball: Path, refresh: bool) -> bool:
    """Whether the cached base may be used again."""
    return (
        not refresh
        and tarball.is_file()
        and time.time() - tarball.stat().st_mtime < MAX_AGE_DAYS * 86400
    )


def is_reachable(url: str, timeout: float = 5.0) -> bool:
    """Whether a server answers; 401 is an answer too (the registry asks for a token)."""
    try:
        urllib.request.urlopen(url, timeout=timeout).close()
    except urllib.error.HTTPError as error:
        return error.code in (401, 403, 405)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


def make_tarball(suite: str, target: Path, work: Workspace, variables: Mapping[str, str]) -> None:
    """Make a minimal Debian with mmdebstrap and keep it as a docker-archive."""
    ensure_mmdebstrap()
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"making a minimal Debian {suite}", flush=True)
    # mmdebstrap's other user ids must reach the file: not below a home directory that is 0700.
    rootfs = work.path / "base.tar"
    proxies = {name: v for name, v in variables.items() if name.lower().endswith("_proxy")}
    run_logged(
        mmdebstrap_command(suite, rootfs, variables),
        log=work.log,
        env={**os.environ, **proxies, "BASE_SOURCES": sources_list(suite, variables)},
        cwd=work.path,
    )
    archive = work.path / "base-docker.tar"
    wrap_docker_archive(rootfs, archive)
    publish(archive, target)
    rootfs.unlink()


def ensure_mmdebstrap() -> None:
    """Install mmdebstrap where we may; say how to get it where we may not."""
    if shutil.which("mmdebstrap"):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("changed: apt-get install mmdebstrap (it makes the Debian base)", flush=True)
        for command in (["update"], ["install", "-y", "--no-install-recommends", "mmdebstrap"]):
            done = subprocess.run(
                ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                text=True,
                check=False,
            )
        # What counts is the last one: an update that fails in part may still have found enough.
        if done.returncode == 0:
            return
        raise BuildError(
            f"apt-get install mmdebstrap failed: {explain(done.stderr.splitlines())}:"
            " see what `apt-get update` says"
        )
    raise BuildError(
        "no Docker registry in reach and no mmdebstrap: ask root for `apt-get install mmdebstrap`,"
        " or build where Docker Hub is reachable and copy the SIF here"
    )


def mmdebstrap_command(suite: str, target: Path, variables: Mapping[str, str]) -> List[str]:
    """mmdebstrap(1) for a base without manuals, by the host's mirror but without its name in it."""
    command = [
        "mmdebstrap",
        "--variant=minbase",
        "--format=tar",
        "--include=ca-certificates",
        "--skip=output/dev",  # device nodes: Apptainer brings its own, --fakeroot cannot make them
        '--aptopt=Acquire::Languages "none"',
        "--aptopt=Acquire::Retries 3",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    ]
    if variables.get("DEBIAN_MIRROR"):
        # By a variable, not by name: a mirror may carry a password, a command line is public.
        command += [
            '--setup-hook=cp "$1/etc/apt/sources.list" "$1/etc/apt/sources.list.own"',
            '--setup-hook=printf "%s" "$BASE_SOURCES" > "$1/etc/apt/sources.list"',
            '--customize-hook=mv "$1/etc/apt/sources.list.own" "$1/etc/apt/sources.list"',
        ]
    return [*command, suite, str(target)]


def sources_list(suite: str, variables: Mapping[str, str]) -> str:
    """A sources.list(5) for the host's own mirrors; empty where it names none."""
    mirror, security = variables.get("DEBIAN_MIRROR"), variables.get("DEBIAN_SECURITY_MIRROR")
    lines = [f"deb {mirror} {each} main\n" for each in (suite, f"{suite}-updates") if mirror]
    return "".join([*lines, f"deb {security} {suite}-security main\n" if security else ""])


def wrap_docker_archive(rootfs: Path, target: Path) -> None:
    """Wrap a root file system's tar as `docker save` does, which Apptainer can bootstrap from.

    Docker Image Specification v1.2: manifest.json, a configuration, and one tar for each layer.
    """
    configuration = {
        "os": "linux",
        "architecture": DOCKER_MACHINES.get(platform.machine(), platform.machine()),
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256_of(rootfs)}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": ["base:latest"], "Layers": ["layer.tar"]}]
    with tarfile.open(str(target), "w") as archive:
        for name, content in (("config.json", configuration), ("manifest.json", manifest)):
            data = json.dumps(content).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
        archive.add(str(rootfs), "layer.tar")
