# SPDX-License-Identifier: Apache-2.0
"""What the checks of all hosts found, as tables for an operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.aerie.findings import ERROR

_REFUSED = "ssh-login"


@dataclass(frozen=True)
class HostReport:
    """A host, what was found there (id, severity, message, remedy), and its facts, empty if they could not be had."""

    name: str
    findings: tuple[Mapping[str, Any], ...]
    facts: Mapping[str, Any]

    def count(self, problems: bool) -> int:
        return sum((finding["severity"] == ERROR) is problems for finding in self.findings)


def combine(reached: Mapping[str, Any], looked: Mapping[str, Any]) -> list[HostReport]:
    """Return a report for each host of ``reached`` (what ssh_check returned) and ``looked`` (what preflight returned).

    A host that preflight could not be run on, or failed on, has that as a finding instead of facts; one that ``looked``
    does not have was only to be reached.
    """
    reports = []
    for name, answer in reached.items():
        findings = [_with_hint(finding, answer, reached) for finding in answer.get("findings", [])]
        result = looked.get(name, {})
        if "findings" in result:
            findings += result["findings"]
        elif answer.get("usable") and name in looked:
            said = str(result.get("module_stderr") or result.get("msg") or "no reason given").strip().splitlines()
            findings.append(_failed(said[-1] if said else "no reason given"))
        reports.append(HostReport(name, tuple(findings), result.get("facts", {})))
    return reports


def _failed(reason: str) -> dict[str, Any]:
    message = f"the host could not be looked at: {reason}"
    return {"id": "look", "severity": ERROR, "message": message, "remedy": "run again with -vvv"}


def _with_hint(finding: Mapping[str, Any], answer: Mapping[str, Any], all_hosts: Mapping[str, Any]) -> dict[str, Any]:
    """Say which part of a refused login another host accepts: a server does not say whether user or key is wrong."""
    if finding["id"] != _REFUSED:
        return dict(finding)
    user, key = answer["login"]["user"], answer["login"]["key"]
    for host, other in all_hosts.items():
        login = other.get("login", {})
        if not other.get("reached") or not login:
            continue
        if key and login["key"] == key and login["user"] != user:
            hint = f"{host} takes this key for the user {login['user']}"
        elif login["user"] == user and login["key"] != key:
            hint = f"{host} takes another key ({login['key'] or 'of ssh'}) for this user"
        else:
            continue
        return {**finding, "message": f"{finding['message']}; {hint}"}
    return dict(finding)


def host_table(reports: Sequence[HostReport]) -> str:
    """Return a line per host: what it is, and how much was found."""
    header = ("host", "system", "gpus", "driver", "memory", "disk free", "problems", "notes")
    rows = [
        (
            report.name,
            str(report.facts.get("system") or "-"),
            _gpus(report.facts.get("gpus") or []),
            str(report.facts.get("driver") or "-"),
            _gigabytes(report.facts.get("memory_mb")),
            _gigabytes(report.facts.get("disk_mb")),
            str(report.count(problems=True)),
            str(report.count(problems=False)),
        )
        for report in reports
    ]
    return _table([header, *rows])


def finding_table(reports: Sequence[HostReport]) -> str:
    """Return a line per finding, problems first."""
    rows = [
        (report.name, "problem" if severe else "note", describe(finding))
        for severe in (True, False)
        for report in reports
        for finding in report.findings
        if (finding["severity"] == ERROR) is severe
    ]
    return _table(rows)


def describe(finding: Mapping[str, Any]) -> str:
    """Return a finding and its remedy as one line."""
    line = f"{finding['message']}: {finding['remedy']}" if finding["remedy"] else str(finding["message"])
    return " ".join(line.split())


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> str:
    counts: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        model = (str(gpu["name"]), int(gpu["memory_mb"]))
        counts[model] = counts.get(model, 0) + 1
    return ", ".join(f"{count} x {name} ({mb >> 10} GiB)" for (name, mb), count in counts.items()) or "-"


def _gigabytes(megabytes: int | None) -> str:
    return "-" if megabytes is None else f"{megabytes / 1024:.0f} GiB"


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)
