"""scripts/setup-apptainer.sh on machines of a few files and fake commands, and on bare Debians.

A fake machine is a directory: etc/, dev/ and run/, which the script sees by SETUP_APPTAINER_ROOT,
and bin/, which is its whole PATH: links to some real tools, and fakes that log how they are called.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup-apptainer.sh"
REAL_TOOLS = (
    "awk bash basename cat chmod comm cp env flock grep head ldd mkdir mktemp mv paste rm sed"
    " sha256sum sleep sort stat tail timeout touch tr"
)

# An engine that runs containers: exec prints how the container's users map, build writes the image.
OWN_USERS = "$(awk '{print $1, $2, $3}' /proc/self/uid_map)"
ENGINE = f"""
case $1 in
  --version) echo "NAME version 9.9" ;;
  exec) echo ran {OWN_USERS} ;;
  build) touch "$3" ;;
esac
"""
BROKEN_BUILD = ENGINE.replace('touch "$3"', 'echo "FATAL: no mapping entry" >&2; exit 255')
REFUSAL = "Requesting capability set 0x1 while permitted capability set is 0x0"
PLAN = "Inst apptainer (1 x)\\n"
BOOKWORM = 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian 12"\n'
TRIXIE = 'ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\nPRETTY_NAME="Debian 13"\n'
UBUNTU = 'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04"\n'


class Machine:
    def __init__(self, path):
        self.root = path / "root"
        self.bin = path / "bin"
        self.log = path / "log"
        for folder in ("etc/apt", "dev", "run", "proc/sys/user", "proc/sys/kernel"):
            (self.root / folder).mkdir(parents=True)
        self.bin.mkdir()
        self.log.touch()
        for tool in REAL_TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.write("etc/os-release", BOOKWORM)
        self.write("etc/subuid", "root:100000:65536\nada:165536:65536\n")
        self.write("etc/subgid", "root:100000:65536\nada:165536:65536\n")
        self.write("dev/fuse", "").chmod(0o666)
        self.user("root")
        self.fake("usermod")
        self.fake("modprobe", "exit 1")
        self.fake("curl", "exit 6")  # as where the host cannot be resolved

    def write(self, name, text):
        file = self.root / name
        file.write_text(text)
        return file

    def fake(self, name, script=""):
        file = self.bin / name
        file.write_text(f'#!/bin/bash\necho "{name} $*" >>"{self.log}"\n{script}\n')
        file.chmod(0o755)
        return file

    def user(self, name):
        uid = {"root": 0}.get(name, 1001)
        self.fake("id", f"case $1 in -un) echo {name} ;; -u) echo {uid} ;; esac")

    def engine(self, name="apptainer"):
        return self.fake(name, ENGINE.replace("NAME", name))

    def apt(self, candidates=(), plan="", install="", update="", arch="amd64"):
        """An apt that knows `candidates`, plans `plan` and, for an installation, runs `install`."""
        known = "|".join(candidates) or "none"
        self.fake("dpkg", f"echo {arch}")
        self.fake(
            "apt-cache",
            f"case $2 in {known}) echo 'Candidate: 1' ;; *) echo 'Candidate: (none)' ;; esac",
        )
        self.fake(
            "apt-get",
            f"""case " $* " in
              *" indextargets "*) printf 'Debian|main|%s|mirror:/here\\n' bookworm trixie ;;
              *" update "*) {update or ":"} ;;
              *" -s "*) printf '{plan}' ;;
              *" install "*) {install or ":"} ;;
              *" download "*) exit 100 ;;
            esac""",
        )

    def installs(self):
        """The command that brings a working apptainer."""
        self.engine().rename(self.root / "apptainer")
        return f'cp "{self.root}/apptainer" "{self.bin}/"'

    def start(self, *args):
        return subprocess.Popen(
            ["bash", str(SCRIPT), *args],
            env={"PATH": str(self.bin), "SETUP_APPTAINER_ROOT": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *args):
        process = self.start(*args)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def calls(self, name):
        return [line for line in self.log.read_text().splitlines() if line.split()[0] == name]

    def files(self):
        return {
            str(file): (file.stat().st_mode, file.is_file() and file.read_bytes())
            for file in self.root.rglob("*")
        }


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# ---- it works already


@pytest.mark.parametrize("user", ["root", "ada"])
@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_a_working_engine_means_one_line_and_no_change(machine, user, name):
    machine.user(user)
    machine.engine(name)
    machine.apt(candidates=["apptainer"])
    before = machine.files()
    result = machine.run()
    assert result.returncode == 0, result.stderr
    mode = "root" if user == "root" else "setuid root"
    works = f"{name} version 9.9 already works ({machine.bin}/{name})"
    assert result.stdout == f"{works}: exec as {mode}, build --fakeroot\n"
    assert machine.files() == before
    assert not machine.calls("apt-get")


def test_a_user_namespace_is_told_from_the_other_modes(machine):
    machine.user("ada")
    machine.fake("apptainer", ENGINE.replace(OWN_USERS, "1001 1001 1"))
    assert "exec as user namespace" in machine.run().stdout


def test_a_version_alone_is_not_a_working_engine(machine):
    machine.user("ada")
    machine.fake("apptainer", ENGINE.replace("echo ran", "echo FATAL: no >&2; exit 255;"))
    result = machine.run()
    assert result.returncode == 1
    assert "apptainer exec says: FATAL: no" in result.stderr


def test_the_game_called_singularity_is_never_played(machine):
    machine.user("ada")
    machine.fake("singularity", "echo 'Endgame: Singularity'")
    assert machine.run().returncode == 1
    assert machine.calls("singularity") == ["singularity --version"]


# ---- without root, and without leave to change anything


def test_a_user_is_told_what_to_ask_for(machine):
    machine.user("bob")
    machine.apt(candidates=["apptainer"])
    before = machine.files()
    result = machine.run()
    assert result.returncode == 1
    for words in (
        "neither apptainer nor singularity is on PATH",
        f"sudo {SCRIPT}",
        "module avail",
        "install-unprivileged.sh",
        "usermod --add-subuids 231072-296607 --add-subgids 231072-296607 bob",  # behind ada's
    ):
        assert words in result.stdout + result.stderr
    assert machine.files() == before
    assert not machine.calls("apt-get")


def test_a_user_who_can_run_but_not_build_gets_a_note(machine):
    machine.user("bob")
    machine.fake("apptainer", BROKEN_BUILD)
    result = machine.run()
    assert result.returncode == 0
    assert "but not build --fakeroot" in result.stdout
    assert "note: " in result.stdout and "no mapping entry" in result.stdout
    assert "usermod --add-subuids" in result.stdout


def test_check_changes_nothing(machine):
    machine.write("etc/subuid", "")
    (machine.root / "dev/fuse").chmod(0o600)
    machine.apt(candidates=["apptainer"], install=machine.installs())
    before = machine.files()
    result = machine.run("--check")
    assert result.returncode == 1
    assert "chmod 0666 /dev/fuse" in result.stderr and "--add-subuids" in result.stderr
    assert machine.files() == before
    assert not machine.calls("apt-get") and not machine.calls("usermod")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("user/max_user_namespaces", "0"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ],
)
def test_a_kernel_that_forbids_user_namespaces_is_named(machine, key, value):
    machine.user("ada")
    machine.write(f"proc/sys/{key}", f"{value}\n")
    result = machine.run()
    assert f"note: {key.replace('/', '.')} is {value}" in result.stderr
    assert f"sysctl -w {key.replace('/', '.')}=" in result.stderr


# ---- what root sets right on the host


def test_root_gets_free_ranges_and_an_open_fuse(machine):
    machine.engine()
    machine.write("etc/subuid", "ada:300000:65536\n")
    machine.write("etc/subgid", "ada:100000:65536\n")
    (machine.root / "dev/fuse").chmod(0o600)
    result = machine.run()
    assert result.returncode == 0, result.stderr
    free = "365536-431071"  # behind ada's, in both files
    assert machine.calls("usermod") == [f"usermod --add-subuids {free} --add-subgids {free} root"]
    assert (machine.root / "dev/fuse").stat().st_mode & 0o777 == 0o666
    assert result.stdout.count("changed: ") == 2


def test_a_missing_fuse_is_named(machine):
    machine.fake("apptainer", BROKEN_BUILD)
    (machine.root / "dev/fuse").unlink()
    result = machine.run()
    assert machine.calls("modprobe") == ["modprobe fuse"]
    assert "/dev/fuse is missing" in result.stdout and "--device /dev/fuse" in result.stdout


def test_root_without_sys_resource_is_configured_around(machine):
    configured = f'"{machine.root}/configured"'
    machine.fake(
        "apptainer",
        f"""case "$1 $5" in
          "config file") touch {configured} ;;
          exec*) [ -e {configured} ] || {{ echo "ERROR: {REFUSAL}" >&2; exit 1; }} ;;
        esac"""
        + ENGINE,
    )
    result = machine.run()
    assert result.returncode == 0, result.stderr
    settings = [call for call in machine.calls("apptainer") if call.split()[1].startswith("c")]
    assert settings == [
        "apptainer capability add --user root all",
        "apptainer capability drop --user root CAP_SYS_RESOURCE",
        "apptainer config global --set root default capabilities file",
    ]
    assert "changed: root default capabilities = file" in result.stdout


def test_root_without_sys_resource_is_told_the_option_if_that_fails(machine):
    machine.apt()
    machine.fake("apptainer", ENGINE.replace("echo ran", f"echo ERROR: {REFUSAL} >&2; exit 1;"))
    result = machine.run("--check")
    assert result.returncode == 1
    assert "--userns" in result.stderr and "APPTAINER_USERNS=1" in result.stderr


# ---- routes


def test_the_distributions_package_comes_first(machine):
    machine.apt(candidates=["apptainer", "squashfuse"], plan=PLAN, install=machine.installs())
    result = machine.run()
    assert result.returncode == 0, result.stderr
    assert (
        "changed: packages installed: apptainer (undo: apt-get purge, with these names)"
        in result.stdout
    )
    assert "version 9.9 works" in result.stdout
    (install,) = [call for call in machine.calls("apt-get") if " -y " in call]
    assert install.endswith("--no-remove --no-install-recommends install apptainer squashfuse")
    assert "DPkg::Lock::Timeout" in install
    assert not machine.calls("curl")


def test_a_plan_with_the_c_library_is_refused(machine):
    plan = "Inst libc6 [2.36] (2.41 x)\\n" + PLAN
    machine.apt(candidates=["apptainer"], plan=plan, install=machine.installs())
    machine.write("etc/os-release", UBUNTU)
    result = machine.run()
    assert result.returncode == 1
    assert "apt would replace the C library for apptainer: left alone" in result.stdout
    assert not [call for call in machine.calls("apt-get") if " -y " in call]


def test_debian_12_ends_with_private_libraries(machine):
    machine.apt(candidates=["libfuse3-3"])
    result = machine.run()
    assert result.returncode == 1
    assert result.stdout.splitlines()[:2] == [
        "the distribution has no package apptainer",
        "upstream cannot be reached: trying the next way",
    ]
    (download,) = [call for call in machine.calls("apt-get") if "download apptainer/sid" in call]
    assert "Dir::State=" in download and "Dir::Etc::SourceParts=-" in download
    assert not list(machine.root.glob("etc/apt/*/*"))
    assert "none of the ways to install apptainer on Debian 12" in result.stderr


SEES_PINNED_SID = """
if [ -e ROOT/etc/apt/sources.list.d/apptainer-sid.sources ]; then
  [ -e ROOT/etc/apt/preferences.d/apptainer-sid.pref ] || echo unpinned >>LOG
  sed -i 's/(none)/1/' BIN/apt-cache
fi"""


@pytest.mark.parametrize("works", [True, False])
def test_debian_13_takes_one_pinned_package_from_sid(machine, works):
    machine.write("etc/os-release", TRIXIE)
    sees = SEES_PINNED_SID
    for name, path in (("ROOT", machine.root), ("LOG", machine.log), ("BIN", machine.bin)):
        sees = sees.replace(name, str(path))
    install = machine.installs() if works else "exit 100"
    machine.apt(plan=PLAN, update=sees, install=install)
    result = machine.run()
    pin = machine.root / "etc/apt/preferences.d/apptainer-sid.pref"
    sources = machine.root / "etc/apt/sources.list.d/apptainer-sid.sources"
    assert "unpinned" not in machine.log.read_text()
    if works:
        assert result.returncode == 0, result.stderr
        assert "Package: *\nPin: release n=sid\nPin-Priority: -1\n" in pin.read_text()
        assert (
            "URIs: mirror:/here\nSuites: sid\nComponents: main\nSigned-By: " in sources.read_text()
        )
        assert f"changed: {sources} and {pin}" in result.stdout
    else:
        assert result.returncode == 1
        assert not pin.exists() and not sources.exists()
        assert any("download apptainer/sid" in call for call in machine.calls("apt-get"))


def test_ubuntu_never_takes_packages_of_debian(machine):
    machine.write("etc/os-release", UBUNTU)
    machine.apt()
    result = machine.run()
    assert result.returncode == 1
    assert result.stdout.splitlines() == [
        "the distribution has no package apptainer",
        "upstream cannot be reached: trying the next way",
    ]
    assert result.stderr.startswith("error: seen:   none of the ways")
    assert "ppa:apptainer/ppa" in result.stderr


def test_fedora_and_its_relatives_use_dnf(machine):
    machine.write("etc/os-release", 'ID=rocky\nVERSION_ID="9.4"\n')
    epel = f'"{machine.root}/epel"'
    machine.fake(
        "dnf",
        f"""case $* in
          *epel-release) touch {epel} ;;
          *) [ -e {epel} ] && {machine.installs()} ;;
        esac""",
    )
    machine.fake("rpm", f'! [ -e "{machine.bin}/apptainer" ] || echo apptainer-9.9')
    result = machine.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "changed: packages installed: apptainer-9.9" in result.stdout
    assert all("--exclude=glibc*" in call for call in machine.calls("dnf") if "epel" not in call)


UPSTREAM_DEB = b"upstream's package"


def serve_upstream(machine, digest):
    """A curl that serves the package, and a release with `digest` for that of Debian 13."""
    digests = {
        "apptainer_1.5.3_amd64.deb": "sha256:other",
        "apptainer_1.5.3-trixie+_amd64.deb": digest,
    }
    assets = [{"name": name, "digest": digest} for name, digest in digests.items()]
    machine.write("release.json", json.dumps({"name": "v1.5.3", "assets": assets}))
    (machine.root / "package").write_bytes(UPSTREAM_DEB)
    machine.fake(
        "curl",
        f"""while [ "$1" != -o ]; do shift; done
        case $3 in
          */releases/tags/v1.5.3) cp {machine.root}/release.json "$2" ;;
          */apptainer_1.5.3*amd64.deb) cp {machine.root}/package "$2" ;;
          *) exit 22 ;;
        esac""",
    )


@pytest.mark.parametrize("os_release", [TRIXIE, UBUNTU], ids=["trixie", "ubuntu"])
def test_upstreams_package_is_installed_with_the_right_checksum(machine, os_release):
    machine.write("etc/os-release", os_release)
    machine.apt(install=machine.installs(), plan=PLAN)
    serve_upstream(machine, "sha256:" + hashlib.sha256(UPSTREAM_DEB).hexdigest())
    result = machine.run()
    assert result.returncode == 0, result.stdout + result.stderr
    (install,) = [call for call in machine.calls("apt-get") if " -y " in call]
    assert "/apptainer_1.5.3-trixie+_amd64.deb" in install


# Checked against the digest in the release, and against the one in the script.
@pytest.mark.parametrize("candidates", [(), ("libfuse3-3",)])
def test_upstreams_package_is_not_installed_with_another_checksum(machine, candidates):
    machine.write("etc/os-release", UBUNTU)
    machine.apt(candidates=candidates, install=machine.installs(), plan=PLAN)
    serve_upstream(machine, "sha256:" + "0" * 64)
    result = machine.run()
    assert result.returncode == 1
    assert "not installed" in result.stdout
    assert not [call for call in machine.calls("apt-get") if " -y " in call]


def test_upstream_is_left_out_on_other_architectures(machine):
    machine.apt(arch="arm64")
    assert "upstream has no package for this machine" in machine.run().stdout
    assert not machine.calls("curl")


# ---- two at once, and one that was killed


def test_a_second_run_waits_and_takes_what_the_first_installed(machine):
    machine.apt(candidates=["apptainer"], plan=PLAN)
    with (machine.root / "run/setup-apptainer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = machine.start()
        assert process.stdout.readline() == "waiting for another run of this script\n"
        machine.engine()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "already works" in out
    assert not machine.calls("apt-get")


def test_what_a_killed_run_left_does_not_count(machine):
    machine.apt(candidates=["apptainer"], plan=PLAN, install="kill -9 $PPID")
    assert machine.run().returncode == -9
    machine.apt(candidates=["apptainer"], plan=PLAN, install=machine.installs())
    machine.fake("apptainer", "exit 1")
    result = machine.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "version 9.9 works" in result.stdout


def test_an_interrupted_dpkg_is_brought_to_an_end(machine):
    configured = machine.root / "configured"
    advice = "E: dpkg was interrupted, you must manually run 'dpkg --configure -a'"
    install = f'[ -e {configured} ] || {{ echo "{advice}"; exit 100; }}; {machine.installs()}'
    machine.apt(candidates=["apptainer"], plan=PLAN, install=install)
    machine.fake("dpkg", f'[ "$*" != "--configure -a" ] || touch {configured}')
    result = machine.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert machine.calls("dpkg") == ["dpkg --configure -a"]


def test_the_help_and_a_wrong_option(machine):
    assert "usage: setup-apptainer.sh" in machine.run("--help").stdout
    assert machine.run("--force").returncode == 2


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(["shellcheck", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stdout


# ---- real installations

# Enter a Debian tree as if it were a machine. chroot would not do: it forbids user namespaces.
# /dev is its own, with a /dev/fuse that is closed as the kernel leaves it.
ENTER = r"""
set -e
mount --make-rprivate / && mount --bind "$1" "$1" && cd "$1" && mkdir -p old
mount -t proc proc proc && mount --rbind /sys sys && mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do
  touch dev/$node && mount --bind /dev/$node dev/$node
done
mknod -m 600 dev/fuse c 10 229
mkdir dev/pts dev/shm && mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx && ln -s /proc/self/fd dev/fd
for fd in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${fd%:*} dev/${fd#*:}; done
pivot_root . old && cd / && umount -l old
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root bash -c "$2"
"""
ORDINARY_USER = r"""
useradd --create-home ada
runuser -u ada -- /setup-apptainer.sh
dpkg-query --showformat '${Version}' --show libc6
"""


def enter(tree, command):
    return subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "bash", "-c", ENTER, "enter", str(tree), command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.fixture
def debian(tmp_path, suite):
    """The smallest tree of a Debian `suite`, able to reach what this machine reaches."""
    tree = tmp_path / suite
    for tool in ("mmdebstrap", "unshare", "pivot_root"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    made = subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", suite, str(tree)],
        stderr=subprocess.PIPE,
        text=True,
    )
    if made.returncode != 0:
        pytest.skip(f"mmdebstrap {suite}: {made.stderr[-300:]}")
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", tree / "etc" / name)
    shutil.copy(str(SCRIPT), tree)
    # The way out of this machine, and what it forgives its mirror.
    dump = subprocess.run(["apt-config", "dump"], stdout=subprocess.PIPE, text=True).stdout
    ways = re.findall("(?im)^Acquire::.*(?:proxy|check-).*\n", dump)
    (tree / "etc/apt/apt.conf.d/99host").write_text("".join(ways))
    yield tree
    shutil.rmtree(tree)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a Debian tree and enter it")
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_bare_debian_gets_an_apptainer_that_works(debian):
    libc = enter(debian, "dpkg-query --showformat '${Version}' --show libc6").stdout.strip()
    first = enter(debian, "/setup-apptainer.sh")
    print(first.stdout)
    assert first.returncode == 0
    assert " works (/usr/bin/apptainer): exec as root, build --fakeroot" in first.stdout
    assert "changed: chmod 0666 /dev/fuse" in first.stdout
    assert "changed: usermod --add-subuids" in first.stdout

    works = r"apptainer version [\d.]+ already works \(/usr/bin/apptainer\): exec as "
    second = enter(debian, "chmod 0666 /dev/fuse && /setup-apptainer.sh")
    assert re.fullmatch(works + "root, build --fakeroot\n", second.stdout), second.stdout

    user = enter(debian, "chmod 0666 /dev/fuse" + ORDINARY_USER)
    assert re.search(works + "user namespace, build --fakeroot\n", user.stdout), user.stdout
    assert user.stdout.splitlines()[-1] == libc  # never upgraded
    assert (debian / "usr/bin/singularity").is_symlink()
