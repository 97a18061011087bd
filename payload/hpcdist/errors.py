"""The one exception that a person who launches a job has to read."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The job cannot start as it was launched.

    The text names the variable (or host, or port), what was seen, what was wanted, and what to
    type instead. It is raised before any collective, so that no rank hangs because of it.
    """
