"""The build itself: dependencies as a cached layer, the payload on top, one SIF out."""

import os
import re
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Dict, NamedTuple

from . import base as base_image
from . import preflight
from .base import Base
from .content import Inputs, image_key, layer_key, read_inputs, stage
from .host_settings import HostSettings, collect, write_host_env
from .process import BuildError, Workspace, hold_lock, run_logged, temporary_directory
from .sif import check_target, publish, read_labels

PYTORCH_INDEX = "https://download.pytorch.org/whl/"
# zstd takes a fifth of gzip's time for the same size; level 1 for what only the cache sees.
ZSTD_LEVEL = {"deps": "1", "payload": "3"}
KEPT_LAYERS = 3


class Options(NamedTuple):
    """What the user asked for; `auto` leaves a choice to the host."""

    root: Path
    flavour: str
    suite: str
    base: str
    torchvision: str
    output: Path
    refresh: bool

    def choices(self) -> Dict[str, str]:
        return {"suite": self.suite, "base": self.base, "torchvision": self.torchvision}


def cache_directory() -> Path:
    """Where bases, wheels and layers are kept: outside the tree (XDG base directory spec)."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except (RuntimeError, KeyError):  # a uid without an account, and no HOME
        raise BuildError("no home directory: XDG_CACHE_HOME=/big/directory make image") from None
    return Path(home).absolute() / "pytorch-dl-hpc"


def build(options: Options) -> None:
    """Make the SIF of this tree, unless the one that is there carries its content key.

    Raises BuildError where it cannot; what was there before is then still there.
    """
    started = time.monotonic()
    inputs = read_inputs(options.root, options.flavour)
    key = image_key(inputs, options.choices())
    output = options.output
    check_target(output)
    if read_labels(output).get("content-key") == key and not options.refresh:
        print(f"{output}: up to date (content key {key})")
        return
    cache, temporary = cache_directory(), temporary_directory()
    found = preflight.problems(temporary, cache, output.parent)
    if found:
        raise BuildError(*found)
    output.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    lock = hold_lock(output.with_name(f".{output.name}.lock"), f"another build of {output.name}")
    log = output.with_name(f"{output.name}.log")  # not x.log beside x.sif: it may be the user's
    with lock, Workspace(temporary, log) as work:
        log.write_text("")
        print(f"building {output.name}, content key {key}; log: {work.log}", flush=True)
        maker = Maker(work, cache, collect(os.environ), inputs)
        deps = maker.dependencies(options)
        finished = maker.run(
            "payload",
            Base("localimage", str(deps)),
            {
                "SUITE": options.suite,
                "TORCHVISION": read_labels(deps).get("version.torchvision", "none"),
                "VERSION": inputs.version,
                "REVISION": revision(options.root),
                "BUILD_DATE": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "CONTENT_KEY": key,
            },
        )
        publish(finished, output)
    size, seconds = output.stat().st_size / 1e6, time.monotonic() - started
    print(f"built {output}: {size:.0f} MB in {seconds:.0f} s", flush=True)


class Maker(NamedTuple):
    """Runs `apptainer build` for one layer after another, with one host's settings and caches."""

    work: Workspace
    cache: Path
    settings: HostSettings
    inputs: Inputs

    def dependencies(self, options: Options) -> Path:
        """Everything but the payload, from the cache where an earlier build left it.

        A change of the payload then installs no torch and needs no network.
        """
        key = layer_key(self.inputs, options.choices())
        target = self.cache / "layers" / f"deps-{key}.sif"
        target.parent.mkdir(exist_ok=True)
        with hold_lock(target.parent / "lock", "another build's dependencies", wait=True):
            if read_labels(target).get("content-key") == key and not options.refresh:
                print(f"dependencies: layer {key} from the cache", flush=True)
                os.utime(target)
                return target
            torchvision = torchvision_version(options, self.inputs)
            base = base_image.choose(
                options.base, options.suite, self.cache, self.work,
                self.settings.variables, options.refresh,
            )  # fmt: skip
            print(f"dependencies: {base.source}, torchvision {torchvision}", flush=True)
            arguments = {"SUITE": options.suite, "TORCHVISION": torchvision, "CONTENT_KEY": key}
            publish(self.run("deps", base, arguments), target)
            layers = sorted(target.parent.glob("deps-*.sif"), key=os.path.getmtime)
            for old in layers[:-KEPT_LAYERS]:
                old.unlink()
        return target

    def run(self, layer: str, base: Base, arguments: Dict[str, str]) -> Path:
        """`apptainer build` of one layer in a directory of its own; returns the new SIF."""
        stage_directory = self.work.path / layer
        context = stage_directory / "context"
        context.mkdir(parents=True)
        stage(self.inputs, stage_directory)
        write_host_env(self.settings, context)
        (context / "cache").mkdir()
        (self.cache / "build").mkdir(exist_ok=True)
        # A relative name, so that the image's own record of its source holds no path of this host.
        if base.source.startswith("/"):
            local = stage_directory / f"base{Path(base.source).suffix}"
            local.symlink_to(base.source)
            base = base._replace(source=local.name)
        binds = {
            str(context): "/mnt",
            str(self.cache / "build"): "/mnt/cache",
            **self.settings.binds,
        }
        arguments = {
            "BOOTSTRAP": base.bootstrap, "FROM": base.source, "LAYER": layer,
            "FLAVOUR": self.inputs.flavour, **arguments,
        }  # fmt: skip
        command = [preflight.find_runtime() or "apptainer", "build", "--fakeroot", "--force"]
        for source, target in binds.items():
            command += ["--bind", f"{source}:{target}"]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        command += ["--mksquashfs-args", f"-comp zstd -Xcompression-level {ZSTD_LEVEL[layer]}"]
        command += ["--notest"] if layer == "deps" else []
        run_logged(
            [*command, f"{layer}.sif", "Singularity.def"],
            log=self.work.log,
            env={**os.environ, "APPTAINER_TMPDIR": str(self.work.path)},
            cwd=stage_directory,
        )
        return stage_directory / f"{layer}.sif"


def torchvision_version(options: Options, inputs: Inputs) -> str:
    """The locked torchvision where PyTorch's index is in reach (or TORCHVISION asks), else none."""
    lock = inputs.dependencies.get(f"payload/requirements/torchvision-{inputs.flavour}.txt", b"")
    found = re.search(r"^torchvision==(\S+)", lock.decode(), re.M)
    locked = found.group(1) if found else "none"
    if options.torchvision not in ("auto", "none", locked):
        raise BuildError(
            f"TORCHVISION={options.torchvision}: wanted auto, none or the locked {locked}"
        )
    if options.torchvision != "auto":
        return options.torchvision
    index = os.environ.get("PYTORCH_INDEX") or f"{PYTORCH_INDEX}{inputs.flavour}/"
    return locked if locked != "none" and base_image.is_reachable(index) else "none"


def revision(root: Path) -> str:
    """The tree's git revision, `-dirty` where it holds changes; `unknown` outside git."""
    done = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
