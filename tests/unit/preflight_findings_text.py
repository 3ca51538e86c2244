# SPDX-License-Identifier: Apache-2.0
"""Findings as a table shows them."""

from __future__ import annotations

from collections.abc import Iterable

from ansible.module_utils.aerie.findings import NOTE, Finding
from ansible.module_utils.aerie.preflight_report import describe


def messages(findings: Iterable[Finding]) -> list[str]:
    """Return each finding and its remedy as one line; notes are marked."""
    return [("note: " if item.severity == NOTE else "") + describe(item.as_dict()) for item in findings]
