"""Skips are loud: with STRICT_SKIPS=1 (make test-local) one that is not expected is a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Reasons that a machine may have for leaving a test out, by how they begin.
EXPECTED_SKIPS = ("gpu:",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests marked gpu where there is no driver, and say so."""
    if Path("/dev/nvidiactl").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: no NVIDIA driver on this machine"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn unexpected skips into a failed run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("STRICT_SKIPS") != "1" or reporter is None:
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])}
    texts = {reason.removeprefix("Skipped: ") for reason in reasons}
    unexpected = sorted(text for text in texts if not text.startswith(EXPECTED_SKIPS))
    if unexpected:
        print("\nunexpected skips:", *unexpected, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
