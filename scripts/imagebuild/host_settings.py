"""What of the build host's settings the image build needs: proxies, CA file, indexes, mirror.

Apptainer's %post sees nothing of the host's environment. `write_host_env` puts the settings into
a shell file that scripts/image.py binds into the build, so that none of them ends in the image.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional

PROXY_NAMES = ("http_proxy", "https_proxy", "no_proxy", "ftp_proxy", "all_proxy")
CA_NAMES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class HostSettings(NamedTuple):
    """Settings for %post (`variables`) and the directories that they name (`binds`).

    `binds` maps a directory of the host to its place in the build.
    """

    variables: Dict[str, str]
    binds: Dict[str, str]
    ca_file: Optional[Path]


def pip_settings(env: Mapping[str, str]) -> Dict[str, str]:
    """pip's effective settings: environment (PIP_*) before configuration files.

    The files are asked through `pip config list`, so that pip decides which of them count.
    """
    settings: Dict[str, str] = {}
    for line in _pip_config_lines(env):
        match = re.match(r"(?:global|install)\.([\w-]+)=(.*)$", line)
        if match:
            settings[match.group(1)] = str(ast.literal_eval(match.group(2)))
    for name, value in env.items():
        if name.startswith("PIP_") and value:
            settings[name[4:].lower().replace("_", "-")] = value
    return settings


def _pip_config_lines(env: Mapping[str, str]) -> List[str]:
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(
            [*command, "config", "list"], capture_output=True, text=True, env=dict(env), check=False
        )
        if done.returncode == 0:
            return done.stdout.splitlines()
    return []


def debian_mirrors(apt_directory: Path = Path("/etc/apt")) -> Dict[str, str]:
    """The Debian mirrors of the host's apt, in both of its file formats (sources.list(5)).

    Returns DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR where they are found; on a host that is not
    Debian, nothing: its mirror holds no Debian.
    """
    texts = [
        path.read_text(errors="replace")
        for path in [
            apt_directory / "sources.list",
            *sorted(apt_directory.glob("sources.list.d/*.list")),
            *sorted(apt_directory.glob("sources.list.d/*.sources")),
        ]
        if path.is_file()
    ]
    found: Dict[str, str] = {}
    for uri in re.findall(r"^(?:URIs:|deb(?:\s+\[[^]]*\])?)\s+(\S+)", "\n".join(texts), re.M):
        uri = uri.rstrip("/")
        if not uri.startswith("http"):  # a disk of the host is not there inside the build
            continue
        if uri.endswith("/debian"):
            found.setdefault("DEBIAN_MIRROR", uri)
        elif uri.endswith("/debian-security"):
            found.setdefault("DEBIAN_SECURITY_MIRROR", uri)
    return found


def collect(env: Mapping[str, str], apt_directory: Path = Path("/etc/apt")) -> HostSettings:
    """Everything that a build behind this host's proxies, mirrors and indexes needs."""
    pip = pip_settings(env)
    variables = debian_mirrors(apt_directory)
    for name in ("DEBIAN_MIRROR", "DEBIAN_SECURITY_MIRROR", "PYTORCH_INDEX"):
        if env.get(name):
            variables[name] = env[name]
    for name in PROXY_NAMES:
        value = env.get(name) or env.get(name.upper())
        if value:
            variables[name] = variables[name.upper()] = value
    if pip.get("proxy"):
        variables.setdefault("https_proxy", pip["proxy"])
        variables.setdefault("http_proxy", pip["proxy"])

    ca_file = _ca_file(env, pip)
    if ca_file:
        variables.update({"SSL_CERT_FILE": "/mnt/ca.pem", "PIP_CERT": "/mnt/ca.pem"})

    binds: Dict[str, str] = {}
    if pip.get("index-url"):
        index = _inside(pip["index-url"], binds)
        variables.update({"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index})
    extra = [_inside(url, binds) for url in pip.get("extra-index-url", "").split()]
    if extra:
        # Every index is asked for every package, as pip does: the hashes decide what is installed.
        variables["PIP_EXTRA_INDEX_URL"] = variables["UV_INDEX"] = " ".join(extra)
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    trusted = " ".join(pip.get("trusted-host", "").split())
    if trusted:
        variables["PIP_TRUSTED_HOST"] = variables["UV_INSECURE_HOST"] = trusted
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on", "t", "y"):
        variables.update({"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"})
    links = [_inside(link, binds) for link in pip.get("find-links", "").split()]
    if links:
        variables["FIND_LINKS"] = variables["PIP_FIND_LINKS"] = " ".join(links)
    return HostSettings(variables, binds, ca_file)


def _ca_file(env: Mapping[str, str], pip: Mapping[str, str]) -> Optional[Path]:
    for value in [pip.get("cert"), *(env.get(name) for name in CA_NAMES)]:
        if value and Path(value).is_file():
            return Path(value)
    return None


def _inside(location: str, binds: Dict[str, str]) -> str:
    """The location as the build sees it; a directory of the host is added to `binds`.

    A `simple` index links to files beside itself (PEP 503), so its parent is what is bound.
    """
    path = location[len("file://") :] if location.startswith("file://") else location
    if "://" in path:
        return location
    directory = Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100,PTH111
    if not directory.is_dir():
        return location
    root = directory.parent if directory.name == "simple" else directory
    target = binds.setdefault(str(root), f"/mnt/local{len(binds)}")
    inside = target if root == directory else f"{target}/{directory.name}"
    return f"file://{inside}" if location.startswith("file://") else inside


def write_host_env(settings: HostSettings, directory: Path) -> None:
    """Write host.env (0600: a proxy or an index URL may carry a password) and ca.pem."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.variables.items()]
    path = directory / "host.env"
    path.touch(mode=0o600)
    path.write_text("\n".join([*lines, ""]))
    if settings.ca_file:
        shutil.copyfile(settings.ca_file, directory / "ca.pem")
    for target in settings.binds.values():
        (directory / Path(target).name).mkdir()
