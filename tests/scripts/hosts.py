"""A host to run the scripts on: a small copy of the tree, a home, a cache, and programs in PATH."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from imagebuild.base import wrap_docker_archive

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Every setting that would make a test depend on the machine that runs it.
HOST_NAMES = re.compile(
    r"PIP_|UV_|XDG_|(https?|no|ftp|all)_proxy$|SSL_|REQUESTS_|CURL_|SLURM_|SBATCH_|APPTAINER|"
    r"SINGULARITY|MAKE|MFLAGS|TMPDIR$|PYTHON|DEBIAN_|PYTORCH_|FLAVOUR$|IMAGE|V$|SITE$",
    re.IGNORECASE,
)

# The real definition's skeleton: the same arguments and labels, nothing to download. The payload's
# own post.sh decides what happens in its layer.
DEFINITION = """\
Bootstrap: {{ BOOTSTRAP }}
From: {{ FROM }}

%arguments
    BOOTSTRAP=docker
    FROM=debian:bookworm-slim
    SUITE=bookworm
    FLAVOUR=cpu
    TORCHVISION=none
    LAYER=all
    VERSION=0
    REVISION=unknown
    BUILD_DATE=unknown
    CONTENT_KEY=unknown

%files
    payload /opt/payload

%post -c /bin/bash
    set -euo pipefail
    test -f /mnt/host.env
    if [ "{{ LAYER }}" = deps ]; then
        echo "layer-key {{ CONTENT_KEY }}" >> "$APPTAINER_LABELS"
        echo "version.torchvision {{ TORCHVISION }}" >> "$APPTAINER_LABELS"
        rm -r /opt/payload
    else
        echo "==> payload {{ SUITE }} {{ BUILD_DATE }}"
        echo "content-key {{ CONTENT_KEY }}" >> "$APPTAINER_LABELS"
        echo "flavour {{ FLAVOUR }}" >> "$APPTAINER_LABELS"
        echo "org.opencontainers.image.version {{ VERSION }}" >> "$APPTAINER_LABELS"
        echo "org.opencontainers.image.revision {{ REVISION }}" >> "$APPTAINER_LABELS"
        . /opt/payload/post.sh
    fi
"""


def make_tree(path):
    """The scripts as they are, under a definition and a payload of a few lines."""
    shutil.copytree(ROOT / "scripts", path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (path / "Singularity.def").write_text(DEFINITION)
    payload = path / "payload"
    (payload / "requirements").mkdir(parents=True)
    for name in ("build", "cpu", "torch-cpu", "torchvision-cpu"):
        (payload / "requirements" / f"{name}.txt").write_text(f"{name}==1.0 --hash=sha256:0\n")
    (payload / "requirements/torchvision-cpu.txt").write_text("torchvision==0.28.0+cpu\n")
    (payload / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1.2.3"\n')
    (payload / "hello.py").write_text("print('hello')\n")
    (payload / "post.sh").write_text("true\n")
    return path


class Host:
    """Runs the scripts of a small tree with an environment of its own."""

    def __init__(self, path):
        self.path = path
        self.tree = make_tree(path / "tree")
        self.output = self.tree / "build" / "Pytorch_DL_HPC-cpu.sif"
        self.cache = path / "cache"
        self.temporary = path / "tmp"
        self.bin = path / "bin"
        self.log = path / "calls"
        for directory in (self.cache, self.temporary, self.bin, path / "home", path / "python"):
            directory.mkdir()
        # The real `pip config list` takes half a second and reads this machine's configuration.
        (path / "python" / "pip.py").touch()
        tarball = self.cache / "pytorch-dl-hpc/base" / f"debian-bookworm-{os.uname().machine}.tar"
        tarball.parent.mkdir(parents=True)
        tarball.write_bytes(b"base")
        self.tarball = tarball
        own = {name: value for name, value in os.environ.items() if not HOST_NAMES.match(name)}
        self.env = {
            **own,
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(path / "home"),
            "XDG_CACHE_HOME": str(self.cache),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": str(path / "python"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CEILING_DIRECTORIES": str(path),
        }

    def program(self, name, script):
        """Put a program into PATH, before the machine's own."""
        file = self.bin / name
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
        return file

    def fake_apptainer(self):
        text = (HERE / "fake_apptainer.py").read_text()
        self.program("apptainer", f"#!{sys.executable} -IS\n{text}")
        self.env.update(FAKE_LOG=str(self.log), FAKE_MODULES=str(HERE))
        return self

    def calls(self, verb):
        """The command lines of the fake apptainer's calls."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [call for call in map(json.loads, lines) if isinstance(call, list) and call[0] == verb]

    def start(self, script, *arguments, wrapper=(), cwd=None, **env):
        return subprocess.Popen(
            [*wrapper, sys.executable, str(self.tree / "scripts" / script), *map(str, arguments)],
            env={name: str(v) for name, v in {**self.env, **env}.items() if v is not None},
            cwd=str(cwd or self.tree),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script, *arguments, **options):
        process = self.start(script, *arguments, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def build(self, *arguments, **options):
        return self.run("image.py", "build", *arguments, **options)

    def leftovers(self):
        """What a build or a pull must not leave: workspaces, and parts of images."""
        parts = [path for path in self.output.parent.glob(".*") if path.suffix != ".lock"]
        return sorted(path.name for path in [*self.temporary.iterdir(), *parts])


def tiny_base(tarball, work):
    """A docker-archive with a shell and a dozen commands of this machine: boots in a second."""
    root = work / "rootfs"
    for tool in ("sh", "bash", "cat", "mkdir", "sleep", "ls", "rm", "cp", "chmod", "ln", "true"):
        real = Path(shutil.which(tool)).resolve()
        linked = subprocess.run(["ldd", str(real)], capture_output=True, text=True).stdout
        for file in [real, *map(Path, re.findall(r"(/\S+) \(0x", linked))]:
            target = root / str(file).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.resolve(), target)
        (root / "bin").mkdir(exist_ok=True)
        if not (root / "bin" / tool).exists():
            (root / "bin" / tool).symlink_to(real)
    for name in ("dev", "etc", "mnt", "opt", "proc", "root", "sys", "tmp", "var"):
        (root / name).mkdir(exist_ok=True)
    layer = work / "layer.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(layer), "."], check=True)
    wrap_docker_archive(layer, tarball)
