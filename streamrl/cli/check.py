"""``streamrl check``: the checks of ``prepare.machine_check``, printed with their remedies in the command's own
process."""

from __future__ import annotations

from streamrl.cli.command import Command
from streamrl.prepare.machine_check import Finding, State, check_machine

_MARKS = {State.OK: "ok  ", State.WARN: "warn", State.FAIL: "FAIL"}


class Check(Command, frozen=True):
    """Check what this machine can run, with a remedy for what it cannot."""

    def run(self) -> int:
        """Return 1 if a finding must be repaired before a run with real engines."""
        findings = check_machine()
        self.print(findings, *finding_lines(findings))
        return int(any(finding.state is State.FAIL for finding in findings))


def finding_lines(findings: list[Finding]) -> list[str]:
    """Lay findings out in two columns, with the remedy below each finding that has one."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.state]}  {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':{width + 8}}-> {finding.remedy}")
    failures = sum(finding.state is State.FAIL for finding in findings)
    warnings = sum(finding.state is State.WARN for finding in findings)
    verdict = "this machine can run streamrl" if not failures else "runs with real engines cannot work here yet"
    return [*lines, "", f"{verdict} ({failures} to repair, {warnings} to know)"]
