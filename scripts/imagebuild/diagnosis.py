"""What a failed command's output means: one line for the user out of hundreds."""

import re
from typing import Sequence

# What went wrong, how programs say it, what to do.
CAUSES = (
    (
        "the disk is full",
        "no space left on device|disk quota exceeded",
        "free some space, or choose other directories with TMPDIR=… XDG_CACHE_HOME=… OUT=…",
    ),
    (
        "a certificate is not trusted",
        "certificate_verify_failed|certificate verif|unknownissuer|x509:",
        "export SSL_CERT_FILE=/path/of/your/site's/ca.pem",
    ),
    (
        "no network",
        (
            "no such host|temporary failure (in name )?resol|could not resolve|dns error"
            "|failed to lookup address|connection refused|could not connect|unable to connect"
            "|connection timed out|network is unreachable|no route to host|i/o timeout"
            "|newconnectionerror|connecttimeout"
        ),
        "check http_proxy, https_proxy, DEBIAN_MIRROR, PIP_INDEX_URL, PYTORCH_INDEX",
    ),
)
ERROR = r"\s*(E:|ERROR|error|FATAL|Singularity\.def:|\w*Error:)"
# Apptainer's last words repeat that there was an error, not which.
ECHO = r"while running %post section|while running %test section"
LONGEST = 240


def explain(lines: Sequence[str]) -> str:
    """The cause that the lines show, with the line that shows it and, where known, a remedy."""
    for cause, pattern, remedy in CAUSES:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):
                return f"{cause} ({_shorten(line)}): {remedy}"
    said = [line for line in lines if line.strip() and not re.search(ECHO, line)]
    errors = [line for line in said if re.match(ERROR, line)]
    return _shorten((errors[:1] or said[-1:] or ["it printed nothing"])[0])


def _shorten(line: str) -> str:
    line = without_passwords(" ".join(line.split()))
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def without_passwords(text: str) -> str:
    """The text with the user and password of its URLs struck out."""
    return re.sub(r"(\w://)[^/\s@'\"]+@", r"\1***@", text)
