# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are accepted as they should be: thresholds, confidence bounds and the verdict, from counted rounds.

A round is what was counted for a few prompts that ran together; rounds are the independent observations, for drafts of
one answer are alike. A mean over drafts is estimated as the ratio of sums over rounds. Its variance over rounds gives
the number of independent drafts that would know as much (never more than there were), that number is reduced for the
few rounds that it is estimated from (Korn and Graubard 1998), and the bounds are Wilson's for it; an acceptance length
is one plus k times such a mean. A comparison with an earlier measurement on the same prompts uses the differences
between equal rounds, so what prompts have in common cancels.

CONFIDENCE holds for a whole gate: the chance that a drafter which is exactly on all thresholds fails is 5 % at most,
over all comparisons and both looks at the data (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from ansible.module_utils.aerie.speculation import Speculation

PASSED, WARNED, FAILED, NOT_APPLICABLE = "passed", "warned", "failed", "not_applicable"

CONFIDENCE = 0.95
# The gate looks when half of the prompts were sent, and, if that does not decide, when all were.
LOOKS = 2
# Length and first position against thresholds, length against the last good release.
_COMPARISONS = 3
_ONE_SIDED = (1 - CONFIDENCE) / (LOOKS * _COMPARISONS)
# With fewer a variance over rounds says nothing.
MIN_ROUNDS = 6

# Three and more drafted tokens, from public reports on Kimi-K2.x: tap ids off by one accept 0.1 where 0.45 is normal.
_FAIL_LENGTH, _FAIL_POSITION_0 = 1.6, 0.30
_WARN_LENGTH, _WARN_POSITION_0 = 2.3, 0.60
# How much of one position's acceptance the next one has in a drafter that is just good enough. With fewer drafted
# tokens the lengths above cannot be asked for.
_NEXT_POSITION = 0.7

# Shares of a baseline's accepted tokens below which the gate fails and warns: on the same prompts, and on others (the
# public numbers of one drafter differ that much between benchmarks and chats).
_SAME_PROMPTS = (0.75, 0.9)
_OTHER_PROMPTS = (0.5, 0.75)
# Of the last good release's acceptance length.
_LAST_GOOD = 0.9

# Below that nothing of the drafter works at all.
_NOTHING = 0.05


class Round(NamedTuple):
    """What was counted for ``requests`` prompts that ran together and were answered with ``tokens`` tokens."""

    requests: int
    tokens: int
    speculation: Speculation


class Interval(NamedTuple):
    """An estimate with its one-sided bounds."""

    low: float
    estimate: float
    high: float


class Thresholds(NamedTuple):
    """Below which acceptance length and first position fail and warn, and where that comes from."""

    fail_length: float
    fail_position_0: float
    warn_length: float
    warn_position_0: float
    source: str


class Conditions(NamedTuple):
    """What two measurements must share to be compared."""

    speculative_tokens: int
    prompts_sha256: str
    sampling: Mapping[str, Any]

    def same_as(self, record: Mapping[str, Any]) -> bool:
        """Say whether ``record``, an earlier result, was measured so."""
        return self == (record.get("speculative_tokens"), record.get("prompts_sha256"), record.get("sampling"))


class Verdict(NamedTuple):
    """``decided``: more prompts would not change it. ``reason``: a name for programs, empty if passed."""

    verdict: str
    reason: str
    message: str
    decided: bool
    bounds: dict[str, Any]


class _Comparison(NamedTuple):
    what: str
    reason: str
    interval: Interval
    fail: float
    warn: float

    @property
    def failed(self) -> bool:
        return self.interval.high < self.fail

    @property
    def undecided(self) -> bool:
        return self.interval.low < self.fail <= self.interval.high

    @property
    def low(self) -> bool:
        return self.interval.estimate < self.warn


def total(rounds: Sequence[Round]) -> Speculation:
    """Return the sums over ``rounds``."""
    counted = [item.speculation for item in rounds]
    positions = max((len(item.accepted_per_position) for item in counted), default=0)
    return Speculation(
        sum(item.drafts for item in counted),
        sum(item.draft_tokens for item in counted),
        sum(item.accepted_tokens for item in counted),
        tuple(sum(_at(item, position) for item in counted) for position in range(positions)),
    )


def acceptance_length(counted: Speculation) -> float | None:
    """Return the tokens per step, None without drafts."""
    return 1 + counted.accepted_tokens / counted.drafts if counted.drafts else None


def default_thresholds(k: int) -> Thresholds:
    """Return the thresholds for ``k`` drafted tokens where nothing is known about the drafter.

    A length is no more than what a drafter on the threshold of the first position reaches if each further position
    accepts 0.7 of the one before; that matters for k below 3 (1.30 and 1.60 for k = 1, 1.51 and 2.02 for k = 2).
    """
    reach = sum(_NEXT_POSITION**position for position in range(k))
    return Thresholds(
        min(_FAIL_LENGTH, 1 + _FAIL_POSITION_0 * reach),
        _FAIL_POSITION_0,
        min(_WARN_LENGTH, 1 + _WARN_POSITION_0 * reach),
        _WARN_POSITION_0,
        f"defaults for {k} drafted tokens",
    )


def thresholds_for(
    conditions: Conditions, baseline: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> Thresholds:
    """Return the thresholds: as ``given``, else from a ``baseline`` with as many drafted tokens, else the defaults.

    ``given`` may have any of the keys fail_length, fail_position_0, warn_length and warn_position_0; ``baseline`` is an
    earlier result of the gate, or as much of it as is known: speculative_tokens, acceptance_length, per_position,
    prompts_sha256, sampling.
    """
    k = conditions.speculative_tokens
    chosen = default_thresholds(k)
    if baseline and baseline.get("speculative_tokens") == k and baseline.get("acceptance_length"):
        same = conditions.same_as(baseline)
        fail, warn = _SAME_PROMPTS if same else _OTHER_PROMPTS
        accepted = float(baseline["acceptance_length"]) - 1
        positions = baseline.get("per_position") or []
        first = float(positions[0]) if positions else None
        chosen = Thresholds(
            1 + fail * accepted,
            chosen.fail_position_0 if first is None else fail * first,
            1 + warn * accepted,
            chosen.warn_position_0 if first is None else warn * first,
            "the drafter's baseline" + ("" if same else ", of other prompts"),
        )
    named = {key: float(value) for key, value in (given or {}).items() if value is not None}
    return chosen._replace(**named, source="given") if named else chosen


def check_thresholds(given: Mapping[str, Any] | None) -> None:
    """Raise ValueError if ``given`` has anything but thresholds."""
    names = Thresholds._fields[:-1]
    for name, value in (given or {}).items():
        if name not in names or isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise ValueError(f"thresholds has {name}: {value!r}; there are the numbers {', '.join(names)}")


def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, within 1 % from 5 degrees of freedom on (Cornish-Fisher)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (order + 1) for order, term in enumerate(terms))


def mean_interval(sums: Sequence[int], drafts: Sequence[int], ceiling: int) -> Interval:
    """Return the mean per draft of a number between 0 and ``ceiling``, from its sums and the drafts of each round.

    At least 2 rounds and one draft.
    """
    count, rounds = sum(drafts), len(drafts)
    share = sum(sums) / (count * ceiling)
    variance = _variance([(own / ceiling - share * each) / count for own, each in zip(sums, drafts)])
    z = NormalDist().inv_cdf(1 - _ONE_SIDED)
    # The most that a number between 0 and 1 with this mean can vary by.
    most = share * (1 - share)
    independent = min(float(count), most / variance) if variance > 0 else float(count)
    independent *= (z / student_quantile(1 - _ONE_SIDED, rounds - 1)) ** 2
    centre = (share + z * z / (2 * independent)) / (1 + z * z / independent)
    half = z / (1 + z * z / independent) * math.sqrt(most / independent + z * z / (4 * independent**2))
    return Interval(ceiling * max(centre - half, 0.0), ceiling * share, ceiling * min(centre + half, 1.0))


def paired_interval(rounds: Sequence[Round], earlier: Sequence[Sequence[int]], share: float) -> Interval:
    """Return by how much the acceptance length exceeds ``share`` of that of ``earlier``, on the same prompts.

    ``earlier`` has (drafts, accepted tokens, ...) for each round. Both have drafts, and at least 2 rounds.
    """
    now = [(item.speculation.drafts, item.speculation.accepted_tokens) for item in rounds]
    before = [(int(item[0]), int(item[1])) for item in earlier]
    mean, influence = _ratio(now)
    mean_before, influence_before = _ratio(before)
    difference = 1 + mean - share * (1 + mean_before)
    spread = math.sqrt(_variance([own - share * other for own, other in zip(influence, influence_before)]))
    half = student_quantile(1 - _ONE_SIDED, len(now) - 1) * spread
    return Interval(difference - half, difference, difference + half)


def _ratio(pairs: Sequence[tuple[int, int]]) -> tuple[float, list[float]]:
    """Return accepted tokens per draft and what each round adds to its error (its influence)."""
    drafts = sum(each for each, _ in pairs)
    mean = sum(own for _, own in pairs) / drafts
    return mean, [(own - mean * each) / drafts for each, own in pairs]


def _variance(influence: Sequence[float]) -> float:
    rounds = len(influence)
    return rounds / (rounds - 1) * sum(value * value for value in influence)


def record_of(rounds: Sequence[Round]) -> list[list[int]]:
    """Return what a later release is compared with: drafts and accepted tokens of each round."""
    return [[item.speculation.drafts, item.speculation.accepted_tokens] for item in rounds]


def judge(
    rounds: Sequence[Round],
    conditions: Conditions,
    thresholds: Thresholds,
    last_good: Mapping[str, Any] | None,
) -> Verdict:
    """Judge what was counted in ``rounds``.

    It fails only if a confidence bound is below a threshold. ``last_good`` is an earlier result; where it was not
    measured under the same ``conditions`` it is left out.
    """
    k = conditions.speculative_tokens
    counted = total(rounds)
    requests = sum(item.requests for item in rounds)
    sample = f"{counted.drafts} drafts in {requests} answers, {k} tokens each"
    if len(rounds) < MIN_ROUNDS or not counted.drafts:
        message = (
            f"The sample is too small to judge acceptance: {sample}, in {len(rounds)} rounds of {MIN_ROUNDS} at least. "
            "Give more prompts, or less concurrency."
        )
        return Verdict(WARNED, "sample_too_small", message, False, {})
    drafts = [item.speculation.drafts for item in rounds]
    accepted = mean_interval([item.speculation.accepted_tokens for item in rounds], drafts, k)
    length = Interval(1 + accepted.low, 1 + accepted.estimate, 1 + accepted.high)
    first = mean_interval([_at(item.speculation, 0) for item in rounds], drafts, 1)
    comparisons = [
        _Comparison("acceptance length", "below_threshold", length, thresholds.fail_length, thresholds.warn_length),
        _Comparison(
            "acceptance of the first position",
            "below_threshold",
            first,
            thresholds.fail_position_0,
            thresholds.warn_position_0,
        ),
    ]
    comparisons += _with_last_good(rounds, conditions, length, last_good)
    bounds = {
        "confidence": CONFIDENCE,
        "method": "Wilson, effective sample size over rounds, one-sided for the whole gate",
        "acceptance_length": [round(length.low, 4), round(length.high, 4)],
        "position_0": [round(first.low, 4), round(first.high, 4)],
    }
    measured = (
        f"Acceptance length {length.estimate:.2f} ({length.low:.2f} to {length.high:.2f}), first position "
        f"{first.estimate:.2f} ({first.low:.2f} to {first.high:.2f}); {sample}."
    )
    decided = not any(item.undecided for item in comparisons)
    for item in comparisons:
        if item.failed:
            said = (
                f"{measured} The {item.what} is below {item.fail:.2f} ({_source(item, thresholds)}), by its bound too."
            )
            return Verdict(FAILED, item.reason, f"{said} {_remedy(item, first, thresholds)}", True, bounds)
    for item in comparisons:
        if item.undecided:
            said = (
                f"{measured} The sample is too small to tell whether the {item.what} is below {item.fail:.2f} "
                f"({_source(item, thresholds)}): give more prompts."
            )
            return Verdict(WARNED, "sample_too_small", said, False, bounds)
    for item in comparisons:
        if item.low:
            said = (
                f"{measured} The {item.what} is below {item.warn:.2f} ({_source(item, thresholds)}): speculation gains "
                "less than it should."
            )
            return Verdict(WARNED, "low", f"{said} {_remedy(item, first, thresholds)}", decided, bounds)
    return Verdict(PASSED, "", measured, decided, bounds)


def _with_last_good(
    rounds: Sequence[Round], conditions: Conditions, length: Interval, last_good: Mapping[str, Any] | None
) -> list[_Comparison]:
    """Return the comparison with the last good release, if there is one that was measured on the same rounds."""
    if not comparable(last_good, conditions, len(rounds)):
        return []
    assert last_good is not None
    excess = paired_interval(rounds, last_good["rounds"], _LAST_GOOD)
    limit = length.estimate - excess.estimate
    interval = Interval(limit + excess.low, length.estimate, limit + excess.high)
    return [_Comparison("acceptance length", "below_last_good", interval, limit, limit)]


def comparable(last_good: Mapping[str, Any] | None, conditions: Conditions, rounds: int) -> bool:
    """Say whether ``last_good`` has ``rounds`` rounds that were measured under ``conditions``."""
    if not last_good or not conditions.same_as(last_good):
        return False
    record = last_good.get("rounds") or []
    return len(record) == rounds and any(item[0] for item in record)


def _source(item: _Comparison, thresholds: Thresholds) -> str:
    return "0.9 of the last good release's" if item.reason == "below_last_good" else thresholds.source


def _remedy(item: _Comparison, first: Interval, thresholds: Thresholds) -> str:
    if first.estimate < _NOTHING:
        return (
            "Almost nothing is accepted: check for another target's drafter, random weights or a wrong d2t with "
            "`make doctor`, and the tap ids with playbooks/probe_taps.yml."
        )
    if first.estimate < thresholds.warn_position_0:
        return "The tap ids may be off by one: measure that with playbooks/probe_taps.yml."
    if item.reason == "below_last_good":
        return "See what the release changed: vLLM's version, the drafter, the options."
    return (
        "The first position is fair and the later ones are not: check norm_output and norm_before_residual in the "
        "drafter's configuration."
    )


def _at(counted: Speculation, position: int) -> int:
    return counted.accepted_per_position[position] if position < len(counted.accepted_per_position) else 0
