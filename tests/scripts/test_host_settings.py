"""What of the host's pip, apt, proxy and CA settings reaches a build, and how safely."""

import os
import stat
import subprocess
import sys

import pytest
from imagebuild import host_settings
from imagebuild.host_settings import collect, debian_mirrors, pip_settings, write_host_env

NO_APT = "/nonexistent"
ONE_LINE_STYLE = """\
# deb http://old/debian x main
deb http://one/debian/ x main
deb-src http://src/debian x main
deb http://two/debian x main
deb [arch=amd64 signed-by=/k.gpg] http://one/debian-security x main
"""
DEB822_STYLE = """\
Types: deb
URIs: https://one/debian
Suites: x

Types: deb
URIs: https://one/debian-security/
Suites: x
"""


@pytest.fixture
def pip_config(monkeypatch):
    """What `pip config list` prints; nothing to begin with."""
    lines = []
    monkeypatch.setattr(host_settings, "_pip_config_lines", lambda env: lines)
    return lines


def gather(env, apt=NO_APT):
    return collect(env, host_settings.Path(apt))


# ---- pip -----------------------------------------------------------------------------------


def test_the_environment_goes_before_files_and_install_before_global(pip_config):
    """pip's own precedence; settings of other commands and empty variables do not count."""
    pip_config += [
        "global.index-url='https://global/simple'",
        "global.timeout='9'",
        "install.index-url='https://install/simple'",
        "install.no-index='yes'",
        "download.index-url='https://other/simple'",
        ":env:.index-url='https://ignored/simple'",
    ]
    assert pip_settings({})["index-url"] == "https://install/simple"
    settings = pip_settings(
        {"PIP_INDEX_URL": "https://env/simple", "PIP_NO_INDEX": "", "PIPX": "1"}
    )
    assert settings == {"index-url": "https://env/simple", "timeout": "9", "no-index": "yes"}


def test_real_pip_is_asked_for_its_files(tmp_path):
    """`pip config list`, with quotes and line ends in a value."""
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nextra-index-url =\n  https://a/simple\n  https://b/simple?it's\n")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": str(config)}
    found = pip_settings(env)["extra-index-url"].split()
    assert found == ["https://a/simple", "https://b/simple?it's"]


def test_a_host_without_pip_has_no_settings(tmp_path, monkeypatch):
    """The Python that runs this may have no pip module, and PATH no pip."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named pip >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pip_settings({}) == {}


def test_indexes_reach_pip_and_uv(pip_config):
    pip_config += [
        "global.index-url='https://one/simple'",
        "global.extra-index-url='https://two/simple\\nhttps://three/simple'",
        "global.trusted-host='one\\ntwo'",
    ]
    found = gather({}).variables
    assert found["PIP_INDEX_URL"] == found["UV_DEFAULT_INDEX"] == "https://one/simple"
    assert (
        found["PIP_EXTRA_INDEX_URL"]
        == found["UV_INDEX"]
        == ("https://two/simple https://three/simple")
    )
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert found["PIP_TRUSTED_HOST"] == found["UV_INSECURE_HOST"] == "one two"
    assert "PIP_NO_INDEX" not in found


@pytest.mark.parametrize(
    ("value", "set_"), [("1", True), ("on", True), ("True", True), ("0", False), ("false", False)]
)
def test_no_index_in_the_words_that_pip_takes(pip_config, value, set_):
    found = gather({"PIP_NO_INDEX": value}).variables
    assert ("PIP_NO_INDEX" in found, "UV_NO_INDEX" in found) == (set_, set_)


def test_local_wheels_and_indexes_are_bound_in(pip_config, tmp_path, monkeypatch):
    """A directory, a file:// URL, ~ and a relative path; web pages stay as they are."""
    for name in ("wheels", "index/simple", "home/more", "here"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    links = f"{tmp_path}/wheels https://web/wheels ~/more here file://{tmp_path}/here"
    settings = gather(
        {"PIP_FIND_LINKS": links, "PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/index/simple/"}
    )
    # A `simple` index links to files beside itself: so its parent is what is bound.
    assert settings.variables["UV_INDEX"] == "file:///mnt/local0/simple"
    assert settings.variables["FIND_LINKS"] == (
        "/mnt/local1 https://web/wheels /mnt/local2 /mnt/local3 file:///mnt/local3"
    )
    assert settings.binds == {
        f"{tmp_path}/index": "/mnt/local0",
        f"{tmp_path}/wheels": "/mnt/local1",
        f"{tmp_path}/home/more": "/mnt/local2",
        f"{tmp_path}/here": "/mnt/local3",
    }


def test_a_directory_that_is_missing_is_not_bound(pip_config, tmp_path):
    """A bind to a missing path would end the build; pip only skips such a directory."""
    settings = gather({"PIP_FIND_LINKS": str(tmp_path / "missing")})
    assert settings.binds == {}
    assert settings.variables["FIND_LINKS"] == str(tmp_path / "missing")


# ---- proxies and certificates --------------------------------------------------------------


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY"])
def test_a_proxy_is_set_in_both_cases(pip_config, name):
    found = gather({name: "http://proxy:3128"}).variables
    assert found == {"https_proxy": "http://proxy:3128", "HTTPS_PROXY": "http://proxy:3128"}


def test_the_lower_case_proxy_wins_and_pips_own_is_the_last_resort(pip_config):
    found = gather(
        {"http_proxy": "http://lower", "HTTP_PROXY": "http://upper", "PIP_PROXY": "http://pip"}
    ).variables
    assert (found["http_proxy"], found["https_proxy"]) == ("http://lower", "http://pip")


@pytest.mark.parametrize("name", host_settings.CA_NAMES)
def test_a_ca_file_is_copied_into_the_build(pip_config, tmp_path, name):
    """Under the one name that apt, pip and uv are told; a missing file is no CA file."""
    (tmp_path / "ca").write_text("certificate")
    assert gather({name: str(tmp_path / "none")}).ca_file is None
    settings = gather({name: str(tmp_path / "ca")})
    assert settings.variables == {"SSL_CERT_FILE": "/mnt/ca.pem", "PIP_CERT": "/mnt/ca.pem"}
    (tmp_path / "context").mkdir()
    write_host_env(settings, tmp_path / "context")
    assert (tmp_path / "context/ca.pem").read_text() == "certificate"


# ---- apt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "sources.list",
            ONE_LINE_STYLE,
            ("http://one/debian", "http://one/debian-security"),
        ),
        (
            "sources.list.d/debian.sources",
            DEB822_STYLE,
            ("https://one/debian", "https://one/debian-security"),
        ),
        ("sources.list.d/x.list", "deb http://one/debian x main\n", ("http://one/debian", None)),
        ("sources.list", "deb http://one/ubuntu x main\n", (None, None)),
        ("sources.list", "deb file:/srv/debian x main\ndeb cdrom:[D]/debian x main", (None, None)),
        ("sources.list", "deb mirror+file:/etc/apt/mirrors/debian x main\n", (None, None)),
        ("other", "deb http://one/debian x main\n", (None, None)),
    ],
)
def test_the_debian_mirrors_of_apt(tmp_path, file, text, expected):
    """Both file formats, the first mirror of each kind; what the build cannot reach is left out."""
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / file).write_text(text)
    found = debian_mirrors(tmp_path)
    assert (found.get("DEBIAN_MIRROR"), found.get("DEBIAN_SECURITY_MIRROR")) == expected


def test_a_mirror_in_the_environment_goes_before_apts(pip_config, tmp_path):
    (tmp_path / "sources.list").write_text("deb http://apt/debian x main\n")
    found = gather({"DEBIAN_MIRROR": "http://env/debian", "PYTORCH_INDEX": "http://t"}, tmp_path)
    assert found.variables == {"DEBIAN_MIRROR": "http://env/debian", "PYTORCH_INDEX": "http://t"}


# ---- host.env ------------------------------------------------------------------------------


def test_values_of_any_kind_survive_the_shell(pip_config, tmp_path):
    """host.env is sourced in %post: nothing in a value is code."""
    values = {
        "http_proxy": "http://u:p$(touch owned)'\"`touch owned`\\@host:1/?a b&c;d\n#e",
        "PIP_INDEX_URL": "https://user:it's $HOME@index/simple",
        "PYTORCH_INDEX": "",
    }
    write_host_env(gather(values), tmp_path)
    done = subprocess.run(
        ["bash", "-c", 'set -eu; . ./host.env; printf "%s\\0" "$HTTP_PROXY" "$UV_DEFAULT_INDEX"'],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\0")[:2] == [values["http_proxy"], values["PIP_INDEX_URL"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["host.env"]


def test_host_env_is_for_its_owner_only(pip_config, tmp_path):
    """A proxy or an index URL may carry a password: with umask 0 the file is 0600 all the same."""
    before = os.umask(0)
    try:
        write_host_env(gather({"http_proxy": "http://u:secret@host"}), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "host.env").stat().st_mode) == 0o600


def test_every_bind_has_its_place_in_the_context(pip_config, tmp_path):
    """/mnt/localN must exist in the directory that is bound over /mnt."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "context").mkdir()
    settings = gather({"PIP_FIND_LINKS": str(tmp_path / "wheels")})
    write_host_env(settings, tmp_path / "context")
    assert (tmp_path / "context/local0").is_dir()
