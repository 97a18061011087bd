"""A host to run the scripts on: a small copy of the tree, a home, a cache, and programs in PATH."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from imagebuild import host_settings, preflight, process
from imagebuild.base import wrap_docker_archive
from sif_files import DATA

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Every setting that would make a test depend on the machine that runs it.
HOST_NAMES = re.compile(
    r"PIP_|UV_|XDG_|(https?|no|ftp|all)_proxy$|SSL_|REQUESTS_|CURL_|SLURM_|SBATCH_|APPTAINER|"
    r"SINGULARITY|MAKE|MFLAGS|TMPDIR$|PYTHON|DEBIAN_|PYTORCH_|FLAVOUR$|IMAGE|V$|SITE$",
    re.IGNORECASE,
)

# What the two long sections of the definition are replaced by: nothing to download. The payload's
# own post.sh decides what happens in its layer.
SECTIONS = {
    "post": """\
    set -euo pipefail
    . /mnt/host.env
    echo "==> {{ LAYER }} on {{ SUITE }}"
    if [ {{ LAYER }} = deps ]; then rm -r /opt/payload; else . /opt/payload/post.sh; fi
""",
    "test": "    test -f /opt/payload/hello.py\n",
}


def tiny_definition():
    """The real definition's arguments, files, labels, environment and help, with SECTIONS."""
    text = (ROOT / "Singularity.def").read_text()
    for name, body in SECTIONS.items():
        text, count = re.subn(rf"(?ms)^(%{name}\b[^\n]*\n).*?(?=^%|\Z)", rf"\1{body}\n", text)
        assert count == 1, f"%{name} of Singularity.def"
    return text


def make_tree(path):
    """The scripts as they are, under a definition and a payload of a few lines."""
    shutil.copytree(
        ROOT / "scripts", path / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    # A build of kilobytes: the checks of free space have tests of their own.
    preflight = path / "scripts/imagebuild/preflight.py"
    preflight.write_text(preflight.read_text().replace("GIB = 1024**3", "GIB = 1"))
    (path / "Singularity.def").write_text(tiny_definition())
    payload = path / "payload"
    (payload / "requirements").mkdir(parents=True)
    for name in ("build", "cpu", "torch-cpu", "torchvision-cpu"):
        (payload / "requirements" / f"{name}.txt").write_text(f"{name}==1.0 --hash=sha256:0\n")
    (payload / "requirements/torchvision-cpu.txt").write_text("torchvision==0.28.0+cpu\n")
    (payload / "pyproject.toml").write_text('[project]\nname = "p"\nversion = "1.2.3"\n')
    (payload / "hello.py").write_text("print('hello')\n")
    (payload / "post.sh").write_text("true\n")
    return path


# `inspect` is asked often, and Python takes its time to start. As the real one it shows the labels
# of a cut image, too.
FAKE_APPTAINER = f"""\
if [[ $1 != inspect ]]; then exec {sys.executable} -IS {HERE}/fake_apptainer.py "$@"; fi
if [[ $(head -c 41 "${{@: -1}}" | tail -c 9) != SIF_MAGIC ]]; then
    echo "FATAL:   Failed to open image ${{@: -1}}: image format not recognized" >&2
    exit 255
fi
labels=$(tail -c +{DATA + 1} "${{@: -1}}" | head -c {DATA} | tr -d '\\0')
echo '{{"data": {{"attributes": {{"labels": '"$labels"'}}}}, "type": "container"}}'
"""


class Host:
    """Runs the scripts of a small tree with an environment of its own."""

    def __init__(self, path):
        self.path = path
        self.tree = make_tree(path / "tree")
        self.output = self.tree / "build" / "Pytorch_DL_HPC-cpu.sif"
        self.cache = path / "cache"
        self.layers = self.cache / "pytorch-dl-hpc" / "layers"
        self.temporary = path / "tmp"
        self.bin = path / "bin"
        self.in_process = False
        self.wanted_bytes = dict.fromkeys(preflight.WANTED_BYTES, 1)
        self.log = path / "calls"
        for directory in (self.cache, self.temporary, self.bin, path / "home", path / "python"):
            directory.mkdir()
        # The real `pip config list` takes half a second and reads this machine's configuration.
        (path / "python" / "pip.py").touch()
        tarball = self.cache / "pytorch-dl-hpc/base" / f"debian-bookworm-{os.uname().machine}.tar"
        tarball.parent.mkdir(parents=True)
        tarball.write_bytes(b"base")
        self.tarball = tarball
        self.program("getsubids", "echo 0: $1 100000 65536")
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
            "PYTORCH_INDEX": "http://127.0.0.1:1/",
        }

    def program(self, name, script):
        """Put a program into PATH, before the machine's own."""
        file = self.bin / name
        file.write_text(script if script.startswith("#!") else f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
        return file

    def fake_apptainer(self):
        self.program("apptainer", FAKE_APPTAINER)
        self.in_process = True
        self.env.update(FAKE_LOG=str(self.log), FAKE_MODULES=str(HERE))
        return self

    def calls(self, verb):
        """The command lines of the fake apptainer's calls."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [
            call for call in map(json.loads, lines) if isinstance(call, list) and call[0] == verb
        ]

    def environment(self, changes):
        """The host's own, with these changes; None removes a variable."""
        return {name: str(v) for name, v in {**self.env, **changes}.items() if v is not None}

    def start(self, script, *arguments, wrapper=(), cwd=None, **env):
        return subprocess.Popen(
            [
                *wrapper,
                sys.executable,
                "-S",
                str(self.tree / "scripts" / script),
                *map(str, arguments),
            ],
            env=self.environment(env),
            cwd=str(cwd or self.tree),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script, *arguments, wrapper=(), cwd=None, **env):
        """The script from beginning to end."""
        if wrapper or not self.in_process:
            process = self.start(script, *arguments, wrapper=wrapper, cwd=cwd, **env)
            out, err = process.communicate(timeout=300)
            return subprocess.CompletedProcess(arguments, process.returncode, out, err)
        return self._run_here(script, arguments, self.environment(env))

    def _run_here(self, script, arguments, env):
        """In this process, which is five times as fast as a new Python."""
        out, err, code = io.StringIO(), io.StringIO(), None
        with contextlib.ExitStack() as stack:
            stack.callback(os.chdir, Path.cwd())
            for number in process.SIGNALS:
                stack.callback(signal.signal, number, signal.getsignal(number))
            os.chdir(self.tree)
            for change in (
                mock.patch.dict(os.environ, env, clear=True),
                mock.patch.dict(preflight.WANTED_BYTES, self.wanted_bytes),
                mock.patch.object(host_settings, "_pip_config_lines", lambda env: []),
                mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                stack.enter_context(change)
            try:
                runpy.run_path(str(self.tree / "scripts" / script), run_name="__main__")
            except SystemExit as end:
                code = end.code
        assert code is not None, f"{script} did not end by sys.exit"
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def build(self, *arguments, **options):
        return self.run("image.py", "build", *arguments, **options)

    def built_layers(self):
        """The layers that the fake apptainer was asked to build, in order."""
        words = [word for call in self.calls("build") for word in call]
        return [word[len("LAYER=") :] for word in words if word.startswith("LAYER=")]

    def edit(self, file):
        with (self.tree / file).open("a") as opened:
            opened.write("# edited\n")

    def start_slow_build(self):
        """A build in the middle of its first layer."""
        build = self.start("image.py", "build", FAKE_APPTAINER="slow")
        for line in build.stdout:
            if "deps installs things" in line:
                break
        return build

    def build_log(self):
        return self.output.with_name(f"{self.output.name}.log").read_text()

    def survivors(self, marker=None, wait=True):
        """Processes that were started here (or whose command line has the marker) and still run.

        Waits for them to end, and gives up after a while.
        """
        for _ in range(300 if wait else 1):
            found = [
                path.name for path in Path("/proc").glob("[0-9]*") if self._is_ours(path, marker)
            ]
            if not found:
                break
            time.sleep(0.05)
        return found

    def _is_ours(self, process, marker):
        try:
            command = (process / "cmdline").read_bytes()
            environment = (process / "environ").read_bytes()
        except OSError:
            return False
        own = f"HOME={self.path / 'home'}\0".encode()
        return own in environment or (marker is not None and marker.encode() in command)

    def leftovers(self):
        """What a build or a pull must not leave: workspaces, and parts of images."""
        parts = [path for path in self.output.parent.glob(".*") if path.suffix != ".lock"]
        return sorted(path.name for path in [*self.temporary.iterdir(), *parts])


TOOLS = (
    "sh",
    "bash",
    "cat",
    "cp",
    "env",
    "ls",
    "mkdir",
    "rm",
    "sed",
    "sleep",
    "test",
    "tr",
    "true",
)


def tiny_base(tarball, work):
    """A docker-archive with a shell and a dozen commands of this machine: boots in a second."""
    root = work / "rootfs"
    for tool in TOOLS:
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


def in_namespace(commands):
    """What to put before a command so that it runs where these mounts were made, and only there."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--mount", "sh", "-c", f'{commands} && exec "$@"', "sh"]


def small_disk(directory, size="64k"):
    """A prefix: there the directory is a file system of that size."""
    return in_namespace(f"mount -t tmpfs -o size={size} none '{directory}'")


def read_only(directory):
    """A prefix: there the directory cannot be written to, by root neither."""
    return in_namespace(
        f"mount --bind '{directory}' '{directory}' && mount -o remount,bind,ro '{directory}'"
    )
