"""Where the Debian under the image comes from, and the archive that mmdebstrap's is wrapped in."""

import hashlib
import http.server
import json
import os
import socket
import tarfile
import threading
import time
from pathlib import Path

import pytest
from imagebuild import base
from imagebuild.process import BuildError, Workspace

TARBALL = f"debian-bookworm-{os.uname().machine}.tar"


@pytest.fixture
def work(tmp_path):
    with Workspace(tmp_path / "tmp", tmp_path / "log") as workspace:
        (tmp_path / "log").touch()
        yield workspace


@pytest.fixture
def mmdebstrap(tmp_path, monkeypatch):
    """A fake that keeps its arguments and sources, and makes a root file system of one file."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/mmdebstrap"
    program.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" > "{tmp_path}/arguments"\n'
        f'printf "%s" "${{BASE_SOURCES-unset}}" > "{tmp_path}/sources"\n'
        f'echo "$https_proxy" > "{tmp_path}/proxy"\n'
        'echo rootfs > etc-issue; tar -cf "${@: -1}" etc-issue\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return tmp_path


def choose(work, tmp_path, kind, *, refresh=False, variables=None):
    return base.choose(kind, "bookworm", tmp_path / "cache", work, variables or {}, refresh)


def cached(tmp_path, *, days=0.0):
    tarball = tmp_path / "cache/base" / TARBALL
    tarball.parent.mkdir(parents=True)
    tarball.write_bytes(b"cached")
    then = time.time() - days * 86400
    os.utime(tarball, (then, then))
    return tarball


@pytest.mark.parametrize("hub", [True, False])
@pytest.mark.parametrize("kind", ["auto", "debian"])
def test_a_base_in_the_cache_is_used_without_asking_anyone(work, tmp_path, monkeypatch, kind, hub):
    monkeypatch.setattr(base, "is_reachable", lambda url: hub)
    tarball = cached(tmp_path, days=29)
    assert choose(work, tmp_path, kind) == ("docker-archive", str(tarball))
    assert tarball.read_bytes() == b"cached"


def test_docker_is_docker_also_with_a_base_in_the_cache(work, tmp_path, monkeypatch):
    """And without asking whether Docker Hub answers: the user may have a mirror configured."""
    monkeypatch.setattr(base, "is_reachable", lambda url: False)
    cached(tmp_path)
    assert choose(work, tmp_path, "docker") == ("docker", "debian:bookworm-slim")


def test_auto_takes_docker_hub_where_it_answers(work, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "is_reachable", lambda url: url == base.DOCKER_REGISTRY)
    assert choose(work, tmp_path, "auto") == ("docker", "debian:bookworm-slim")


@pytest.mark.parametrize(("days", "refresh"), [(31, False), (0, True)])
def test_an_old_base_and_refresh_make_a_new_one(work, mmdebstrap, monkeypatch, days, refresh):
    """An old one lacks security updates."""
    monkeypatch.setattr(base, "is_reachable", lambda url: False)
    tarball = cached(mmdebstrap, days=days)
    chosen = choose(work, mmdebstrap, "auto", refresh=refresh)
    assert chosen == ("docker-archive", str(tarball))
    assert tarball.read_bytes() != b"cached"


def test_a_base_that_cannot_be_made_keeps_the_old_one(work, mmdebstrap, capsys):
    (mmdebstrap / "bin/mmdebstrap").write_text("#!/bin/sh\necho 'E: no disk' >&2; exit 25\n")
    tarball = cached(mmdebstrap, days=31)
    with pytest.raises(BuildError, match="^mmdebstrap failed: E: no disk; log: "):
        choose(work, mmdebstrap, "debian")
    assert tarball.read_bytes() == b"cached"
    assert [path.name for path in tarball.parent.iterdir()] == [TARBALL]


def test_mmdebstrap_gets_mirror_and_proxy_but_no_one_else_sees_the_password(work, mmdebstrap):
    """A command line is public, a log is read by others; in the image is the stock sources.list."""
    choose(
        work,
        mmdebstrap,
        "debian",
        variables={
            "DEBIAN_MIRROR": "http://u:secret@mirror/debian",
            "DEBIAN_SECURITY_MIRROR": "http://u:secret@mirror/debian-security",
            "https_proxy": "http://proxy:3128",
            "PIP_INDEX_URL": "http://not-for-mmdebstrap",
        },
    )
    assert (mmdebstrap / "sources").read_text() == (
        "deb http://u:secret@mirror/debian bookworm main\n"
        "deb http://u:secret@mirror/debian bookworm-updates main\n"
        "deb http://u:secret@mirror/debian-security bookworm-security main\n"
    )
    assert (mmdebstrap / "proxy").read_text() == "http://proxy:3128\n"
    arguments = (mmdebstrap / "arguments").read_text().splitlines()
    assert not any("secret" in argument for argument in arguments)
    assert "secret" not in (mmdebstrap / "log").read_text()
    assert arguments[-2] == "bookworm"
    hooks = [word for word in arguments if "-hook=" in word]
    assert hooks[0].startswith('--setup-hook=cp "$1/etc/apt/sources.list"')
    assert hooks[-1].startswith('--customize-hook=mv "$1/etc/apt/sources.list.own"')


def test_without_a_mirror_mmdebstrap_keeps_its_own(work, mmdebstrap):
    choose(work, mmdebstrap, "debian")
    assert (mmdebstrap / "sources").read_text() == ""
    assert "-hook=" not in (mmdebstrap / "arguments").read_text()


def test_the_archive_is_one_that_docker_save_could_have_written(work, mmdebstrap):
    """Manifest, configuration, one layer with the right digest; and nothing else in the cache."""
    _, source = choose(work, mmdebstrap, "debian")
    with tarfile.open(source) as archive:
        (image,) = json.load(archive.extractfile("manifest.json"))
        configuration = json.load(archive.extractfile(image["Config"]))
        layer = archive.extractfile(image["Layers"][0]).read()
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert configuration["os"] == "linux"
    assert b"rootfs\n" in layer
    assert [path.name for path in Path(source).parent.iterdir()] == [TARBALL]
    assert not list(work.path.glob("*.tar"))


# ---- mmdebstrap itself ---------------------------------------------------------------------


def only(directory, monkeypatch, **programs):
    """A PATH with these programs and no others."""
    (directory / "bin").mkdir()
    for name, script in programs.items():
        (directory / "bin" / name.replace("_", "-")).write_text(f"#!/bin/sh\n{script}\n")
        (directory / "bin" / name.replace("_", "-")).chmod(0o755)
    monkeypatch.setenv("PATH", str(directory / "bin"))


def test_root_installs_mmdebstrap_and_says_so(tmp_path, monkeypatch, capsys):
    only(tmp_path, monkeypatch, apt_get=f'echo "$@" >> {tmp_path}/arguments')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    base.ensure_mmdebstrap()
    assert capsys.readouterr().out.startswith("changed: apt-get install mmdebstrap")
    update, install = (tmp_path / "arguments").read_text().splitlines()
    assert update.split()[-1] == "update"  # a new machine has no package lists
    assert install.split()[-1] == "mmdebstrap"


def test_a_failed_installation_is_one_line(tmp_path, monkeypatch):
    only(tmp_path, monkeypatch, apt_get="printf 'W: x\\nE: Unable to locate\\nE: y' >&2; exit 100")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(BuildError) as caught:
        base.ensure_mmdebstrap()
    assert str(caught.value) == (
        "apt-get install mmdebstrap failed: E: Unable to locate: see what `apt-get update` says"
    )


@pytest.mark.parametrize(("uid", "programs"), [(1001, {"apt_get": "exit 9"}), (0, {})])
def test_who_cannot_install_it_is_told_what_to_ask_for(tmp_path, monkeypatch, uid, programs):
    """An ordinary user; root where there is no apt."""
    only(tmp_path, monkeypatch, **programs)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(
        BuildError, match="ask root for `apt-get install mmdebstrap`, or build where"
    ):
        base.ensure_mmdebstrap()


# ---- is a server in reach? -----------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """A server on this host that answers with the status that its path names."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(int(self.path.strip("/")))
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize(
    ("status", "answer"), [(200, True), (401, True), (403, True), (404, False), (502, False)]
)
def test_an_answer_is_reach_and_an_error_is_not(server, monkeypatch, status, answer):
    """401 is how a registry asks for a token; 404 and 502 come from a proxy in between."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert base.is_reachable(f"{server}/{status}") is answer


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "nonsense", "gopher://x/", "http://[::1"])
def test_no_server_is_no_reach(monkeypatch, url):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert base.is_reachable(url) is False


@pytest.mark.parametrize("words", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 nonsense\r\n\r\n"])
def test_what_does_not_speak_http_is_no_reach(monkeypatch, words):
    """Some proxies: not an answer, and not an error that ends the build either."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with listening.accept()[0] as connection:
                connection.recv(1024)
                connection.sendall(words)

        threading.Thread(target=answer, daemon=True).start()
        assert base.is_reachable(f"http://127.0.0.1:{listening.getsockname()[1]}/") is False
