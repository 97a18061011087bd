"""Checks before a build: what would make it fail minutes later, and the remedy."""

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path
from typing import List, Mapping, Optional, Sequence

GIB = 1024**3
# `--bind` splits at some characters; a shell of Apptainer's build stumbles over others.
UNFIT = {"temporary": ":,'\"`;&|()<>", "cache": ":,", "output": ""}
# Measured for the cpu flavour, generously rounded: the unpacked image plus the SIF being written.
WANTED_BYTES = {"temporary": 4 * GIB, "cache": 3 * GIB, "output": 1 * GIB}
WANTED_IDS = 65536  # Apptainer maps the ids 1 to 65536
# Ownership by other user ids, which --fakeroot needs, does not work on these (apptainer docs,
# "Fakeroot feature"): the build directory must be local.
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "panfs", "fuse.sshfs"}


def find_runtime() -> Optional[str]:
    """The container program: apptainer, or singularity where a site has only that name."""
    return shutil.which("apptainer") or shutil.which("singularity")


def problems(
    temporary: Path, cache: Path, output: Path, env: Mapping[str, str] = os.environ
) -> List[str]:
    """One line for each reason why a build cannot work here; an empty list where it can."""
    found = []
    if find_runtime() is None:
        found.append("no apptainer or singularity in PATH: run `make setup` (or `module load` it)")
    for role, directory, remedy in (
        ("temporary", temporary, "TMPDIR=/local/directory make image"),
        ("cache", cache, "XDG_CACHE_HOME=/big/directory make image"),
        ("output", output, "make image OUT=/big/directory/image.sif"),
    ):
        found += directory_problems(role, directory, remedy)
    found += proxy_problems(env)
    found += subuid_problems()
    found += namespace_problems()
    return found


def directory_problems(role: str, directory: Path, remedy: str) -> List[str]:
    """Is the directory (or the nearest parent that exists) writable and large enough?"""
    existing = directory
    # os.path: a parent that may not be searched counts as missing, instead of raising an error.
    while not os.path.exists(existing) and existing != existing.parent:  # noqa: PTH110
        existing = existing.parent
    if not existing.is_dir():
        return [f"{role} directory {existing} is not a directory: {remedy}"]
    if not is_writable(existing):
        return [f"{role} directory {existing} is not writable: {remedy}"]
    found = []
    odd = sorted(set(UNFIT[role]) & set(str(directory)))
    if odd:
        found.append(
            f"{role} directory {directory} has {' '.join(odd)} in its name,"
            f" which Apptainer cannot take: {remedy}"
        )
    free, wanted = shutil.disk_usage(existing).free, WANTED_BYTES[role]
    if free < wanted:
        found.append(
            f"{role} directory {existing} has {free / GIB:.1f} GiB free,"
            f" {wanted / GIB:.0f} GiB wanted: {remedy}"
        )
    if role == "temporary":
        kind = mount_of(existing)
        if kind["type"] in NETWORK_FILE_SYSTEMS:
            found.append(f"temporary directory {existing} is on {kind['type']}: {remedy}")
        if "noexec" in kind["options"].split(","):
            found.append(f"temporary directory {existing} is mounted noexec: {remedy}")
    return found


def is_writable(directory: Path) -> bool:
    """Whether a file can be made there: on read-only mounts even root's permission bits lie."""
    probe = directory / f".write-test-{os.getpid()}"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def mount_of(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> Mapping[str, str]:
    """Type and options of the mount that holds the directory (proc_pid_mounts(5))."""
    best = {"point": "", "type": "unknown", "options": ""}
    resolved = str(directory.resolve())
    for line in mounts.read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), point)
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best["point"]):
            best = {"point": point, "type": kind, "options": options}
    return best


def proxy_problems(env: Mapping[str, str]) -> List[str]:
    """curl takes a proxy without a scheme, pip and uv do not."""
    return [
        f"{name}={env[name]} has no scheme: export {name}=http://{env[name]}"
        for lower in ("http_proxy", "https_proxy", "all_proxy")
        for name in (lower, lower.upper())
        if env.get(name) and "://" not in env[name]
    ]


def subuid_problems(
    subuid: Path = Path("/etc/subuid"), subgid: Path = Path("/etc/subgid")
) -> List[str]:
    """A --fakeroot build needs a range of user ids, as root too (subuid(5))."""
    number = str(os.geteuid())
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a uid without an account, as in some containers
        user = number
    has_range = all(
        path.is_file() and any(_grants(line, (user, number)) for line in _lines(path))
        for path in (subuid, subgid)
    )
    # getsubids also knows ranges that a directory service hands out (nsswitch.conf, "subid:").
    if has_range or _has_range_elsewhere(user):
        return []
    return [
        (
            f"user {user} has no range of {WANTED_IDS} in /etc/subuid and /etc/subgid: ask root for"
            f" `usermod --add-subuids 1000000-1065535 --add-subgids 1000000-1065535 {user}`"
        )
    ]


def _lines(path: Path) -> List[str]:
    return path.read_text(errors="replace").splitlines()


def _grants(line: str, users: Sequence[str]) -> bool:
    """Whether a line USER:FIRST:COUNT gives one of these users enough ids for Apptainer."""
    fields = line.split(":")
    return (
        len(fields) == 3
        and fields[0] in users
        and fields[2].strip().isdigit()
        and int(fields[2]) >= WANTED_IDS
    )


def _has_range_elsewhere(user: str) -> bool:
    if shutil.which("getsubids") is None:
        return False
    done = subprocess.run(["getsubids", user], capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


def namespace_problems(proc_sys: Path = Path("/proc/sys")) -> List[str]:
    """Can an ordinary user make a user namespace here (user_namespaces(7))?"""
    if os.geteuid() == 0:
        return []
    return [
        f"{name} is {value}: ask root for `sysctl -w {name.replace('/', '.')}={wanted}`"
        for name, forbidden, wanted in (
            ("user/max_user_namespaces", "0", "65536"),
            ("kernel/unprivileged_userns_clone", "0", "1"),
        )
        for value in [_read(proc_sys / name)]
        if value == forbidden
    ]


def _read(path: Path) -> Optional[str]:
    return path.read_text().strip() if path.is_file() else None
