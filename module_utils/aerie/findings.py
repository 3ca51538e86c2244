# SPDX-License-Identifier: Apache-2.0
"""What a check found: the values that disagree, what follows from that, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass(frozen=True)
class Fact:
    """A value, what it is the value of, and the file that states it."""

    what: str
    value: object
    file: str

    def __str__(self) -> str:
        return f"{self.what} {self.value} in {self.file}"


@dataclass(frozen=True)
class Finding:
    """One thing that does not fit: the facts that disagree, what follows from that, and what to do."""

    id: str
    severity: str
    facts: tuple[Fact, ...]
    consequence: str
    remedy: str

    @property
    def message(self) -> str:
        """The facts and the consequence in one sentence."""
        return ": ".join(filter(None, (", but ".join(map(str, self.facts)), self.consequence)))

    def as_dict(self) -> dict[str, object]:
        """Return the finding as JSON-able data."""
        return {
            "id": self.id,
            "severity": self.severity,
            "message": self.message,
            "remedy": self.remedy,
            "facts": [{"what": fact.what, "value": fact.value, "file": fact.file} for fact in self.facts],
        }


def worst_first(findings: list[Finding]) -> list[Finding]:
    """Return ``findings`` with errors before warnings before notes, otherwise in their order."""
    return sorted(findings, key=lambda finding: (ERROR, WARNING, NOTE).index(finding.severity))
