# SPDX-License-Identifier: Apache-2.0
"""The two severities of a preflight: a problem stops the run, a note is shown."""

from __future__ import annotations

from ansible.module_utils.aerie.findings import ERROR, NOTE, Finding


def problem(name: str, message: str, remedy: str) -> Finding:
    """Return a finding that must be mended before anything is changed."""
    return Finding(name, ERROR, (), message, remedy)


def note(name: str, message: str, remedy: str = "") -> Finding:
    """Return a finding that an operator wants to know and that stops nothing."""
    return Finding(name, NOTE, (), message, remedy)
