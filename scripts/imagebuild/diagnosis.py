"""What a failed command's output means: one line for the user out of hundreds."""

import re
from typing import Sequence

CAUSES = (
    ("the disk is full", r"[Nn]o space left on device|disk quota exceeded",
     "free some space, or choose other directories with TMPDIR=… XDG_CACHE_HOME=… OUT=…"),
    ("a certificate is not trusted", r"CERTIFICATE_VERIFY_FAILED|certificate verif|UnknownIssuer|x509:",
     "export SSL_CERT_FILE=/path/of/your/site's/ca.pem"),
    ("no network", r"no such host|[Tt]emporary failure (in name )?resol|[Cc]ould not resolve|"
     r"failed to lookup address|dns error|[Cc]onnection refused|[Cc]ould not connect|"
     r"[Uu]nable to connect|[Cc]onnection timed out|Network is unreachable|No route to host|"
     r"i/o timeout|NewConnectionError|ConnectTimeout",
     "check http_proxy, https_proxy, DEBIAN_MIRROR, PIP_INDEX_URL, PYTORCH_INDEX"),
)  # fmt: skip
ERROR = r"\s*(E:|ERROR|error|FATAL|Singularity\.def:|\w*Error:)"
# Apptainer's last words repeat that there was an error, not which.
ECHO = r"while running %post section|while running %test section"
LONGEST = 240


def explain(lines: Sequence[str]) -> str:
    """The cause that the lines show, with the line that shows it and, where known, a remedy."""
    for cause, pattern, remedy in CAUSES:
        for line in lines:
            if re.search(pattern, line):
                return f"{cause} ({_shorten(line)}): {remedy}"
    errors = [line for line in lines if re.match(ERROR, line) and not re.search(ECHO, line)]
    return _shorten((errors or [line for line in lines if line.strip()] or ["no output"])[-1])


def _shorten(line: str) -> str:
    line = without_passwords(" ".join(line.split()))
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def without_passwords(text: str) -> str:
    """The text with the user and password of its URLs struck out."""
    return re.sub(r"(\w://)[^/\s@'\"]+@", r"\1***@", text)
