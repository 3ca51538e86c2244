# SPDX-License-Identifier: Apache-2.0
"""The lines that are shown to whoever waits, in real time."""

from __future__ import annotations

import queue
import threading

from ansible.module_utils.aerie.waiting import Lines

# Longer than any test takes.
NEVER_S = 3600.0


def test_what_is_new_is_shown_at_once_and_what_lasts_is_not() -> None:
    shown: list[str] = []
    lines = Lines("host-1", shown.append, NEVER_S)
    lines.say("loading", "loading weights 40 %", 61)
    lines.say("loading", "loading weights 41 %", 62)
    lines.say("compiling", "compiling")
    lines.say("compiling", "compiling")
    assert shown == ["host-1: loading weights 40 % (61 s)", "host-1: compiling"]


def test_what_lasts_is_shown_again_while_a_call_goes_on() -> None:
    shown: queue.Queue[str] = queue.Queue()
    lines = Lines("host-1", shown.put, 0.01)
    before = threading.active_count()
    with lines.kept():
        assert shown.get(timeout=10).startswith("host-1: no answer yet (")
        lines.say("loading", "loading weights 40 %")
        while (line := shown.get(timeout=10)).startswith("host-1: no answer yet ("):
            pass
        assert [line, shown.get(timeout=10)] == 2 * ["host-1: loading weights 40 %"]
    assert threading.active_count() == before


def test_a_line_tells_of_the_time_that_has_passed() -> None:
    shown: queue.Queue[str] = queue.Queue()
    lines = Lines("host-1", shown.put, 0.3)
    lines.say("loading", "loading weights", 0.9)
    with lines.kept():
        assert shown.get(timeout=10) == "host-1: loading weights (1 s)"
        while shown.get(timeout=10) == "host-1: loading weights (1 s)":
            pass


def test_what_was_said_last_is_what_is_shown_when_a_line_is_due() -> None:
    shown: queue.Queue[str] = queue.Queue()
    lines = Lines("host-1", shown.put, 0.05)
    lines.say("loading", "loading weights 40 %")
    lines.say("loading", "loading weights 41 %")
    with lines.kept():
        assert shown.get(timeout=10) == "host-1: loading weights 40 %"
        assert shown.get(timeout=10) == "host-1: loading weights 41 %"
