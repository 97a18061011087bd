"""What a failed command printed, in one line. The outputs are real ones, shortened."""

import pytest
from imagebuild.diagnosis import explain, without_passwords

APT = """\
==> Debian packages
W: Failed to fetch http://mirror/debian/dists/bookworm/InRelease  Could not connect to mirror:80
W: Some index files failed to download. They have been ignored, or old ones used instead.
E: Unable to locate package python3
Singularity.def: apt-get install failed
FATAL:   While performing build: while running engine: while running %post section: exit status 1
"""
PIP = """\
WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError('Failed to \
establish a new connection: [Errno 111] Connection refused')': /simple/uv/
ERROR: Could not find a version that satisfies the requirement uv==0.11.1 (from versions: none)
FATAL:   While performing build: while running engine: while running %post section: exit status 1
"""
DOCKER = """\
INFO:    Fetching OCI image...
FATAL:   While performing build: conveyor failed to get: Get "https://index.docker.io/v2/": dial \
tcp: lookup index.docker.io: no such host
"""
SQUASHFS = """\
INFO:    Creating SIF file...
FATAL:   While performing build: while creating squashfs: Write failed: No space left on device
FATAL ERROR: Failed to write to output filesystem
"""
UNSIGNED = """\
W: GPG error: http://mirror/debian bookworm InRelease: The following signatures couldn't be verified
E: The repository 'http://mirror/debian bookworm InRelease' is not signed.
E: mmdebstrap failed to run
"""
SELFTEST = """\
INFO:    Running testscript
Traceback (most recent call last):
  File "/opt/payload/selftest.py", line 9, in <module>
AssertionError: wanted flavour cpu
FATAL:   While performing build: while running %test section: exit status 1
"""


PLAIN = """\
cp: cannot stat 'x': No such file or directory
FATAL:   While performing build: while running engine: while running %post section: exit status 1
"""


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (PLAIN, "cp: cannot stat 'x': No such file or directory"),
        (APT, "no network (W: Failed to fetch http://mirror/debian/dists/bookworm/InRelease Could"),
        (PIP, "no network (WARNING: Retrying (Retry(total=4)) after connection broken by"),
        (DOCKER, 'no network (FATAL: While performing build: conveyor failed to get: Get "https:'),
        (SQUASHFS, "the disk is full (FATAL: While performing build: while creating squashfs:"),
        (UNSIGNED, "E: The repository 'http://mirror/debian bookworm InRelease' is not signed."),
        (SELFTEST, "AssertionError: wanted flavour cpu"),
        ("error: x509: certificate signed by unknown authority\n", "a certificate is not trusted"),
        ("a\nlast words\n\n", "last words"),
        ("", "it printed nothing"),
    ],
)
def test_the_cause_is_told_in_one_line(output, cause):
    found = explain(output.splitlines())
    assert found.startswith(cause)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        (APT, "check http_proxy, https_proxy, DEBIAN_MIRROR, PIP_INDEX_URL, PYTORCH_INDEX"),
        (SQUASHFS, "TMPDIR=… XDG_CACHE_HOME=… OUT=…"),
        ("certificate verify failed", "export SSL_CERT_FILE="),
    ],
)
def test_a_known_cause_has_a_remedy(output, remedy):
    assert remedy in explain(output.splitlines())


def test_a_long_line_is_cut():
    assert len(explain([f"ERROR: {'x' * 1000}"])) == 240


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("Get http://user:secret@host/x failed", "Get http://***@host/x failed"),
        ("--index-url=https://token@host", "--index-url=https://***@host"),
        ("http://a:b@h/ https://c:d@h/", "http://***@h/ https://***@h/"),
        ("http://host/path@2/x", "http://host/path@2/x"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_passwords_are_struck_out(text, safe):
    assert without_passwords(text) == safe
    assert "secret" not in explain([f"error: {text}"])
