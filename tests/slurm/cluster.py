#!/usr/bin/env python3
"""A real two-node Slurm cluster on one machine, for tests and for playing by hand.

    python3 tests/slurm/cluster.py up
    python3 tests/slurm/cluster.py run srun -N2 --ntasks-per-node=2 hostname
    python3 tests/slurm/cluster.py down

Nodes n1 and n2 run their own slurmd in their own network, host name, process, IPC and mount
namespaces, joined by a bridge; the controller and the clients run on the host. Each node offers
4 CPUs and 2 GPUs, which are made up. Needs root, and the packages of install.sh.

The nodes share the host's files, as nodes with a parallel file system do. That includes /tmp,
although each real node has its own: pytest's tmp_path, from where tests submit, lies there.
/dev/shm, /sys and the process table are each node's own.

Nothing is kept in a state file. A running cluster is found again by its traces in the kernel: the
variable MARK in its daemons' environment, the alias of its bridge, the name of its cgroup.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT_DIRECTORY = HERE.parents[1] / "build" / "slurm-cluster"
NODES = ("n1", "n2")
NODE_SCRIPT = str(HERE / "node.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "ip", "unshare", "setpriv", "mount")
# The second, meant for benchmarks in closed networks, is for hosts that route all of 10.0.0.0/8.
NETWORKS = ("10.199.0.0/16", "198.18.0.0/16")
BRIDGE = "slurmtest"
MARK = "SLURM_TEST_CLUSTER"
FOREIGN = re.compile(r"(SLURMD?|SBATCH|SALLOC|SRUN|PMIX?|OMPI|PRTE)_")
DEADLINE = 30.0  # seconds; a start takes about one on an idle machine


class Unsupported(RuntimeError):
    """This machine cannot run the cluster; the message says why."""


class ClusterError(RuntimeError):
    """The cluster did not do what it was asked to; the message says what."""


@dataclass(frozen=True)
class Cluster:
    """A cluster's place and name; `name` is also that of its bridge and its cgroup."""

    directory: Path
    name: str

    def environment(self) -> dict[str, str]:
        """Return our environment for Slurm's clients, without the traces of another job."""
        kept = {key: value for key, value in os.environ.items() if not FOREIGN.match(key)}
        return {**kept, "SLURM_CONF": str(self.directory / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Return what one of Slurm's clients prints, or "" if it fails."""
        env = self.environment()
        with contextlib.suppress(subprocess.SubprocessError):
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=True
            )
            return done.stdout.strip()
        return ""

    def idle_nodes(self) -> set[str]:
        """Return the names of the nodes that wait for work."""
        return set(self.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split())


def start(directory: Path, *, die_with_caller: bool = False) -> Cluster:
    """Start a cluster in `directory`, or return the one that already runs there.

    With `die_with_caller` the daemons are killed when the calling process is.
    """
    check_support()
    directory = directory.resolve()
    if len(os.fsencode(directory)) > 90:
        raise ClusterError(f"too long a path for munge's socket: {directory}")
    with one_at_a_time():
        running = find(directory)
        if running and all(probe_daemons(running).values()):
            return running
        for leftover in (directory, *find_stale()):
            remove(leftover)
        try:
            return boot(directory, die_with_caller)
        except (OSError, subprocess.SubprocessError, ClusterError) as error:
            said = getattr(error, "stderr", None) or ""
            reason = f"no Slurm cluster in {directory}: {error} {said}\n{tail_logs(directory)}"
            remove(directory)
            raise ClusterError(reason) from error


def stop(directory: Path) -> None:
    """Kill the cluster's daemons and jobs, and take away its network and cgroups."""
    with one_at_a_time():
        remove(directory.resolve())


def find(directory: Path) -> Cluster | None:
    """Return the cluster of `directory`, or None if there is no trace of one."""
    for bridge, owner in list_bridges():
        if owner == directory.resolve():
            return Cluster(owner, bridge)
    return None


def check_support() -> None:
    """Raise Unsupported, saying why, where the cluster cannot run."""
    if os.geteuid() != 0:
        raise Unsupported("needs root: it makes namespaces, a bridge and device nodes")
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing:
        raise Unsupported(f"not found: {', '.join(missing)}; run tests/slurm/install.sh")
    probe = ["unshare", "--mount", NODE_SCRIPT, "probe"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise Unsupported(f"needs namespaces and a cgroup v1 freezer: {done.stderr.strip()}")


def boot(directory: Path, die_with_caller: bool) -> Cluster:
    """Start munge, the controller and the nodes, and wait until the nodes are idle."""
    make_directories(directory)
    bridge, network = make_bridge(directory)
    cluster = Cluster(directory, bridge)
    addresses = {node: str(address) for node, address in zip(NODES, network.hosts())}
    write_configuration(cluster, str(network[-2]), addresses)
    daemons: dict[str, int] = {}

    def launch(name: str, *command: str) -> None:
        prefix = ("setpriv", "--pdeathsig", "KILL") if die_with_caller else ()
        daemons[name] = start_daemon(directory, name, [*prefix, *command])

    def wait(condition: Callable[[], object], what: str) -> None:
        wait_until(condition, what, daemons=daemons)

    files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    options = [f"--{file}={directory}/munge/{file.split('-')[0]}" for file in files]
    launch("munged", "munged", "--foreground", "--force", *options)
    wait((directory / "munge" / "socket").exists, "munged's socket")
    launch("slurmctld", "unshare", "--mount", NODE_SCRIPT, "control")
    for node, address in addresses.items():
        launch(node, "unshare", "--mount", NODE_SCRIPT, "run", bridge, node, address)
    wait(lambda: cluster.ask("scontrol", "ping").endswith("UP"), "slurmctld to answer")
    host = os.readlink("/proc/self/ns/net")
    for node in NODES:
        namespace = f"/proc/{daemons[node]}/ns/net"
        wait(lambda path=namespace: os.readlink(path) != host, f"the network of {node}")
        connect_node(f"{bridge}{node}", bridge, daemons[node])
    wait(lambda: cluster.idle_nodes() == set(NODES), "idle nodes")
    return cluster


def make_directories(directory: Path) -> None:
    """Make the cluster's directories anew, for root alone, with a key and fake GPUs."""
    for name in ("munge", "state", "spool", "tmp", "dev", "log"):
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir(mode=0o700, parents=True)
    for node in NODES:
        (directory / "tmp" / node).mkdir(mode=0o700)
        (directory / "spool" / node).mkdir(mode=0o700)
    key = directory / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for index in range(2):  # the numbers of /dev/null: Slurm wants a device that nobody opens
        os.mknod(directory / "dev" / f"nvidia{index}", 0o20600, os.makedev(1, 3))


def write_configuration(cluster: Cluster, controller: str, addresses: dict[str, str]) -> None:
    """Write Slurm's configuration and the nodes' /etc/hosts."""
    host = socket.gethostname().split(".")[0]
    with socket.socket() as free:
        free.bind((controller, 0))
        port = free.getsockname()[1]
    values = {"name": cluster.name, "host": host, "controller": controller, "port": port}
    template = (HERE / "slurm.conf.in").read_text()
    names = {"localhost": "127.0.0.1", host: controller, **addresses}
    files = {
        "slurm.conf": template.format(directory=cluster.directory, **values, **addresses),
        "gres.conf": f"NodeName=n[1-2] Name=gpu File={cluster.directory}/dev/nvidia[0-1]\n",
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n",
        "hosts": "".join(f"{address} {name}\n" for name, address in names.items()),
    }
    for name, text in files.items():
        (cluster.directory / name).write_text(text)


def start_daemon(directory: Path, name: str, command: list[str]) -> int:
    """Start a process in a session of its own, marked as the cluster's; return its id."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": f"{directory}/slurm.conf",
        MARK: str(directory),
    }
    log = f"{directory}/log/{name}.log"
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawnp(command[0], command, environment, file_actions=files, setsid=True)


def make_bridge(directory: Path) -> tuple[str, ipaddress.IPv4Network]:
    """Make a bridge in the first free network; its alias tells whose it is."""
    routes = json.loads(ip("-json", "-4", "route", "show", "table", "all"))
    taken = [ipaddress.ip_network(route["dst"]) for route in routes if route["dst"] != "default"]
    subnets = (ipaddress.ip_network(network).subnets(new_prefix=24) for network in NETWORKS)
    for number, network in enumerate(itertools.chain.from_iterable(subnets)):
        bridge = f"{BRIDGE}{number}"
        used = any(network.overlaps(other) for other in taken)
        if used or Path("/sys/class/net", bridge).exists():
            continue
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "alias", str(directory))
        ip("address", "add", f"{network[-2]}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        return bridge, network
    raise ClusterError(f"no free network in {' or '.join(NETWORKS)}")


def connect_node(link: str, bridge: str, pid: int) -> None:
    """Plug a cable into the bridge; its other end is eth0 in the process' network."""
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    ip("link", "set", link, "master", bridge, "up")


def ip(*arguments: str) -> str:
    """Run ip(8) and return what it prints."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def list_bridges() -> list[tuple[str, Path]]:
    """Return the name and the directory of every cluster's bridge."""
    links = json.loads(ip("-json", "link", "show", "type", "bridge") or "[]")
    named = [(link["ifname"], link.get("ifalias", "")) for link in links if link]
    return [(name, Path(alias)) for name, alias in named if name.startswith(BRIDGE) and alias]


def find_daemons(directory: Path) -> dict[int, str]:
    """Return the processes that were started for the cluster in `directory`: ids and commands."""
    mark = f"{MARK}={directory}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = command.decode(errors="replace").strip()
    return found


def find_stale() -> list[Path]:
    """Return the directories of clusters whose daemons are gone and whose bridge is not."""
    return [directory for _, directory in list_bridges() if not find_daemons(directory)]


def remove(directory: Path) -> None:
    """Kill what runs for the cluster in `directory` and remove its traces from the kernel."""
    killed: set[int] = set()

    def kill_all() -> bool:
        for pid in (pids := find_daemons(directory)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        return not pids

    kill_all()
    bridges = [bridge for bridge, owner in list_bridges() if owner == directory]
    for bridge in bridges:
        try:
            sweep = ["unshare", "--mount", NODE_SCRIPT, "sweep", bridge]
            subprocess.run(sweep, check=True, timeout=DEADLINE)
        except subprocess.SubprocessError as error:
            raise ClusterError(f"processes are left in the cgroup {bridge}: {error}") from error
    wait_until(kill_all, f"the daemons of {directory} to die")
    for pid in killed:
        with contextlib.suppress(ChildProcessError):  # another process started it
            os.waitpid(pid, 0)
    for bridge in bridges:
        for link in (*(f"{bridge}{node}" for node in NODES), bridge):
            with contextlib.suppress(subprocess.CalledProcessError):  # it went with its node
                ip("link", "delete", link)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Keep other starts and stops out, by a socket's name that is freed with its process."""
    with socket.socket(socket.AF_UNIX) as lock:

        def bind() -> bool:
            with contextlib.suppress(OSError):
                lock.bind(f"\0{MARK}")
                return True
            return False

        wait_until(bind, "another start or stop of a cluster to end", 3 * DEADLINE)
        yield


def wait_until(
    condition: Callable[[], object],
    what: str,
    timeout: float = DEADLINE,
    *,
    daemons: dict[str, int] | None = None,
) -> None:
    """Poll `condition` until it is true; give up early if one of our daemons has ended."""
    deadline = time.monotonic() + timeout
    while not condition():
        for name, pid in (daemons or {}).items():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                raise ClusterError(f"{name} ended while waiting for {what}")
        if time.monotonic() > deadline:
            raise ClusterError(f"waited {timeout:g} s for {what}")
        time.sleep(0.03)


def probe_daemons(cluster: Cluster) -> dict[str, bool]:
    """Say for munge, the controller and each node whether its daemon runs.

    The processes are asked, as the controller takes minutes to miss a node.
    """
    commands = {"munged": "munged --foreground", "slurmctld": "slurmctld -D"}
    commands.update({node: f"slurmd -D -N {node}" for node in NODES})
    running = find_daemons(cluster.directory).values()
    return {
        name: any(line.startswith(command) for line in running)
        for name, command in commands.items()
    }


def tail_logs(directory: Path, lines: int = 15) -> str:
    """Return the last lines of every daemon's log."""
    logs = [*sorted((directory / "log").glob("*.log")), directory / "munge" / "log"]
    tails = {log: log.read_text(errors="replace").splitlines() for log in logs if log.exists()}
    parts = [[f"--- the end of {log}", *tail[-lines:]] for log, tail in tails.items()]
    return "\n".join(line for part in parts for line in part)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    helps = {
        "up": "start the cluster",
        "down": "stop it",
        "status": "show its daemons, nodes and jobs",
        "run": "run a command, or a shell, with its SLURM_CONF",
    }
    for verb, text in helps.items():
        options = verbs.add_parser(verb, help=text)
        options.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="(%(default)s)")
    options.add_argument("command", nargs=argparse.REMAINDER)
    try:
        sys.exit(act(parser.parse_args()))
    except (Unsupported, ClusterError) as error:
        sys.exit(f"cluster.py: {error}")


def act(arguments: argparse.Namespace) -> str | int:
    """Do what the command line asks for; return what sys.exit takes."""
    if arguments.verb == "up":
        cluster = start(arguments.dir)
        print(f"export SLURM_CONF={cluster.directory}/slurm.conf")
        return 0
    if arguments.verb == "down":
        stop(arguments.dir)
        return 0
    running = find(arguments.dir)
    if running is None:
        return f"no cluster runs in {arguments.dir}; start it: {sys.argv[0]} up"
    if arguments.verb == "run":
        command = arguments.command or ["bash"]
        os.execvpe(command[0], command, running.environment())
    for name, is_up in probe_daemons(running).items():
        print(f"{name}: {'up' if is_up else 'down'}")
    print(running.ask("sinfo", "-N", "-l"), running.ask("squeue"), sep="\n")
    return 0


if __name__ == "__main__":
    main()
