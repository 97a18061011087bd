"""Make payload/ importable for the tests here and for the processes that they start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PAYLOAD = Path(__file__).resolve().parents[2] / "payload"

sys.path.insert(0, str(PAYLOAD))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(PAYLOAD), *filter(None, [os.environ.get("PYTHONPATH")])]
)
