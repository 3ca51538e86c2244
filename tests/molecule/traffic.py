# SPDX-License-Identifier: Apache-2.0
"""A client that asks all the time, for answers and for streams, and compares each with what it must be."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

_TIMEOUT_S = 30.0
_TOKENS = 8


class Traffic:
    """Asks ``address`` from ``at_once`` clients, with ``pause_s`` between the requests of one; half are streams.

    With ``together`` they ask at the same moment, and pause at the same time: as many requests are under way at once,
    and between them the engine leaves room for others.

    ``expected`` gives the text that must follow a prompt. ``failures`` has what went wrong, ``answered`` the number of
    answers by what the engine calls itself (the stand-in tells its host and its release).
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: str,
        model: str,
        expected: Callable[[str, int], str],
        at_once: int = 4,
        pause_s: float = 0.02,
        together: bool = False,
    ) -> None:
        self.failures: list[str] = []
        self.answered: Counter[str] = Counter()
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._model = model
        self._expected = expected
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._start = threading.Barrier(at_once if together else 1)
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(at_once)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._start.abort()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        count = 0
        while not self._stop.wait(self._pause_s):
            with contextlib.suppress(threading.BrokenBarrierError):
                self._start.wait()
            prompt = f"client {number} asks for the time number {count}"
            stream = (number + count) % 2 == 0
            try:
                text, who = self._complete(prompt, stream)
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
                self.failures.append(f"{time.strftime('%T')} {'stream' if stream else 'answer'}: {error!r}")
            else:
                if text != self._expected(prompt, _TOKENS):
                    self.failures.append(f"{time.strftime('%T')} {who} answered {text!r} to {prompt!r}")
                self.answered[who] += 1
            count += 1

    def _complete(self, prompt: str, stream: bool) -> tuple[str, str]:
        """Return the text that follows ``prompt``, and what the engine calls itself."""
        request = {"model": self._model, "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "stream": stream}
        # A connection for each request: one that is kept may be closed at the moment in which it is used again.
        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(request), self._headers)
            response = connection.getresponse()
            body = response.read().decode()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {body[:200]}")
        answers: list[dict[str, Any]] = [json.loads(body)] if not stream else _events(body)
        who = str(answers[0].get("system_fingerprint"))
        return "".join(answer["choices"][0]["text"] for answer in answers), who


def _events(body: str) -> list[dict[str, Any]]:
    *events, last = [line.removeprefix("data: ") for line in body.splitlines() if line]
    if last != "[DONE]":
        raise ValueError(f"a stream was cut after {len(events)} events")
    return [json.loads(event) for event in events]
