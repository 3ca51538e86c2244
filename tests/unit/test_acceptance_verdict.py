# SPDX-License-Identifier: Apache-2.0
"""Thresholds, bounds and the verdict; and by simulation that the gate fails as seldom as it says, and as often as it
must, for drafts of one answer that are alike."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from ansible.module_utils.aerie.acceptance_verdict import (
    CONFIDENCE,
    MIN_ROUNDS,
    Conditions,
    Round,
    Verdict,
    comparable,
    default_thresholds,
    judge,
    mean_interval,
    paired_interval,
    record_of,
    student_quantile,
    thresholds_for,
)
from ansible.module_utils.aerie.speculation import Speculation
from hypothesis import given
from hypothesis import strategies as st

CONDITIONS = Conditions(3, "digest", {"temperature": 0})
# Drafts per answer of 128 tokens at an acceptance length near 1.6, prompts per round, rounds at the first look.
DRAFTS, TOGETHER, ROUNDS = 80, 2, 12
TRIALS = 4000


def counted(drafts: int, positions: Sequence[int]) -> Round:
    return Round(TOGETHER, 2 * drafts, Speculation(drafts, len(positions) * drafts, sum(positions), tuple(positions)))


def drawn(chance: random.Random, rates: Sequence[float], alike: float, drafts: int = DRAFTS) -> Round:
    """Return a round of answers whose own acceptance varies: ``alike`` is the correlation of drafts of one answer."""
    positions = [0] * len(rates)
    for _ in range(TOGETHER):
        # One hardness for each answer, which moves all of its positions.
        first = rates[0]
        spread = 1 / alike - 1
        own = chance.betavariate(first * spread, (1 - first) * spread)
        for _ in range(drafts):
            draw = chance.random()
            if draw < own:
                positions[0] += 1
                # Further positions as shares of the first.
                for position in range(1, len(rates)):
                    if draw < own * rates[position] / first:
                        positions[position] += 1
    return counted(TOGETHER * drafts, positions)


def gate(rounds: Sequence[Round], last_good: dict[str, Any] | None = None) -> Verdict:
    k = len(rounds[0].speculation.accepted_per_position)
    conditions = CONDITIONS._replace(speculative_tokens=k)
    return judge(rounds, conditions, default_thresholds(k), last_good)


def looks(chance: random.Random, rates: Sequence[float], alike: float, drafts: int = DRAFTS) -> Verdict:
    """Look at half of the rounds, and at all if that does not decide, as the gate does."""
    rounds = [drawn(chance, rates, alike, drafts) for _ in range(ROUNDS)]
    verdict = gate(rounds)
    if verdict.decided:
        return verdict
    return gate([*rounds, *(drawn(chance, rates, alike, drafts) for _ in range(ROUNDS))])


# --- Thresholds


@pytest.mark.parametrize(("k", "fail", "warn"), [(1, 1.3, 1.6), (2, 1.51, 2.02), (3, 1.6, 2.3), (5, 1.6, 2.3)])
def test_default_thresholds_are_within_reach(k: int, fail: float, warn: float) -> None:
    chosen = default_thresholds(k)
    assert list(chosen[:4]) == pytest.approx([fail, 0.30, warn, 0.60])


BASELINE = {
    "speculative_tokens": 3,
    "acceptance_length": 3.0,
    "per_position": [0.8, 0.7, 0.5],
    "prompts_sha256": "digest",
    "sampling": {"temperature": 0},
}


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        (BASELINE, (2.5, 0.6, 2.8, 0.72)),
        # A number of a model card: other prompts, and no more is known.
        ({"speculative_tokens": 3, "acceptance_length": 3.0}, (2.0, 0.30, 2.5, 0.60)),
        ({**BASELINE, "sampling": {"temperature": 1}}, (2.0, 0.4, 2.5, 0.6)),
        # Of another number of drafted tokens: no baseline.
        ({**BASELINE, "speculative_tokens": 4}, (1.6, 0.30, 2.3, 0.60)),
        ({}, (1.6, 0.30, 2.3, 0.60)),
    ],
)
def test_thresholds_from_a_baseline(baseline: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert thresholds_for(CONDITIONS, baseline, None)[:4] == pytest.approx(expected)


def test_given_thresholds_win() -> None:
    chosen = thresholds_for(CONDITIONS, BASELINE, {"fail_length": 1.2, "warn_length": None})
    assert list(chosen[:4]) == pytest.approx([1.2, 0.6, 2.8, 0.72])
    assert chosen.source == "given"


# --- Bounds


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [(0.95, 10, 1.812), (0.99, 5, 3.365), (0.99, 7, 2.998), (0.995, 5, 4.032), (0.995, 23, 2.807), (0.975, 30, 2.042)],
)
def test_student_quantiles_of_the_tables(probability: float, freedom: int, expected: float) -> None:
    assert student_quantile(probability, freedom) == pytest.approx(expected, rel=0.01)


def test_bounds_are_never_narrower_than_of_independent_drafts() -> None:
    """Rounds that happen to be equal do not prove anything beyond their drafts."""
    equal = mean_interval([30] * 8, [100] * 8, 1)
    # Wilson, one-sided at the gate's level for one comparison at one look.
    z = 2.39
    wilson = (0.3 + z * z / 1600 + z * math.sqrt(0.3 * 0.7 / 800 + z * z / (4 * 800**2))) / (1 + z * z / 800)
    assert wilson < equal.high < wilson + 0.02
    assert equal.estimate == pytest.approx(0.3)
    unequal = mean_interval([0, 60] * 4, [100] * 8, 1)
    assert unequal.high > equal.high + 0.1


def test_bounds_of_nothing_and_of_everything() -> None:
    nothing, everything = mean_interval([0] * 6, [50] * 6, 3), mean_interval([150] * 6, [50] * 6, 3)
    assert list(nothing[:2]) == pytest.approx([0, 0])
    assert 0 < nothing.high < 0.2
    assert list(everything[1:]) == pytest.approx([3, 3])
    assert everything.low == pytest.approx(3 - nothing.high)


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 1000)), min_size=2, max_size=40))
def test_bounds_enclose_the_estimate(rounds: list[tuple[int, int]]) -> None:
    drafts = [each for each, _ in rounds]
    sums = [min(own, 3 * each) for each, own in rounds]
    low, estimate, high = mean_interval(sums, drafts, 3)
    assert 0 <= low <= estimate + 1e-9
    assert estimate - 1e-9 <= high <= 3
    assert estimate == pytest.approx(sum(sums) / sum(drafts))


def test_a_paired_comparison_leaves_out_what_prompts_have_in_common() -> None:
    chance = random.Random(1)
    before = [drawn(chance, (0.6, 0.4, 0.3), 0.3) for _ in range(ROUNDS)]
    same = paired_interval(before, record_of(before), 0.9)
    length = 1 + sum(r.speculation.accepted_tokens for r in before) / sum(r.speculation.drafts for r in before)
    assert same.estimate == pytest.approx(0.1 * length)
    assert same.low > 0
    alone = mean_interval([r.speculation.accepted_tokens for r in before], [r.speculation.drafts for r in before], 3)
    assert same.high - same.low < (alone.high - alone.low) / 2


# --- Verdicts


def test_too_few_rounds_decide_nothing() -> None:
    verdict = gate([counted(200, (0, 0, 0))] * (MIN_ROUNDS - 1))
    assert (verdict.verdict, verdict.reason, verdict.decided) == ("warned", "sample_too_small", False)
    assert gate([counted(200, (0, 0, 0))] * MIN_ROUNDS).verdict == "failed"


def test_last_good_release_of_other_conditions_is_left_out() -> None:
    rounds = [counted(100, (70, 50, 30))] * 8
    last = {**CONDITIONS._asdict(), "rounds": [[100, 290]] * 8}
    assert comparable(last, CONDITIONS, 8)
    assert gate(rounds, last).reason == "below_last_good"
    for other in (
        {**last, "rounds": [[100, 290]] * 7},
        {**last, "rounds": [[0, 0]] * 8},
        {**last, "prompts_sha256": "another"},
        {**last, "sampling": {"temperature": 1}},
        {key: value for key, value in last.items() if key != "rounds"},
    ):
        assert not comparable(other, CONDITIONS, 8)
        assert gate(rounds, other).verdict == "passed"


@pytest.mark.parametrize(("accepted", "reason"), [(140, "below_last_good"), (170, ""), (176, ""), (240, "")])
def test_ten_percent_below_the_last_good_release_fails(accepted: int, reason: str) -> None:
    """From 3.0 tokens per step, 2.7 are just enough."""
    last = {**CONDITIONS._asdict(), "rounds": [[100, 200]] * 8}
    positions = (min(accepted, 90), min(max(accepted - 90, 0), 80), max(accepted - 170, 0))
    assert judge([counted(100, positions)] * 8, CONDITIONS, default_thresholds(3), last).reason == reason


# --- By simulation


@pytest.mark.parametrize("alike", [0.02, 0.2])
@pytest.mark.parametrize("rates", [(0.30, 0.17, 0.13), (0.30,), (0.45, 0.12, 0.03), (0.30, 0.30, 0.30)])
def test_a_drafter_on_the_threshold_fails_seldom(rates: tuple[float, ...], alike: float) -> None:
    """Acceptance is exactly what the thresholds ask for, or one of the two is; both looks are used."""
    chance = random.Random(f"{rates} {alike}")
    drafts = 20
    failed = sum(looks(chance, rates, alike, drafts).verdict == "failed" for _ in range(TRIALS))
    assert failed / TRIALS <= 1 - CONFIDENCE


def test_drafts_taken_for_independent_would_fail_more_often_than_that() -> None:
    """The simulation can tell: a bound over drafts alone is wrong for drafts that are alike."""
    chance = random.Random(5)
    failed = 0
    for _ in range(400):
        rounds = [drawn(chance, (0.30, 0.17, 0.13), 0.2, 20) for _ in range(ROUNDS)]
        drafts = sum(item.speculation.drafts for item in rounds)
        rate = sum(item.speculation.accepted_per_position[0] for item in rounds) / drafts
        failed += rate + 1.645 * math.sqrt(rate * (1 - rate) / drafts) < 0.30
    assert failed / 400 > 2 * (1 - CONFIDENCE)


def test_what_is_broken_fails_at_the_first_look() -> None:
    chance = random.Random(2)
    for _ in range(200):
        verdict = gate([drawn(chance, (0.10, 0.02, 0.01), 0.1) for _ in range(ROUNDS)])
        assert (verdict.verdict, verdict.reason) == ("failed", "below_threshold")


def test_what_is_healthy_is_clear_at_the_first_look() -> None:
    chance = random.Random(3)
    verdicts = [gate([drawn(chance, (0.70, 0.48, 0.33), 0.1) for _ in range(ROUNDS)]) for _ in range(200)]
    assert all(verdict.verdict in ("passed", "warned") for verdict in verdicts)
    assert sum(verdict.decided for verdict in verdicts) >= 199


def test_a_release_as_good_as_90_percent_of_the_last_fails_seldom() -> None:
    """Every prompt accepts as before on average, or exactly a tenth less; only drafts differ by chance."""
    chance = random.Random(4)
    failed = {1.0: 0, 0.9: 0, 0.7: 0}
    trials = 300
    for _ in range(trials):
        hardness = [chance.betavariate(6, 4) for _ in range(ROUNDS)]

        def measured(factor: float, hardness: list[float] = hardness) -> list[Round]:
            rounds = []
            for own in hardness:
                # k = 1: the length is 1 + own; `factor` of that.
                rate = max(factor * (1 + own) - 1, 0.0)
                rounds.append(counted(100, [sum(chance.random() < rate for _ in range(100))]))
            return rounds

        last = measured(1.0)
        conditions = CONDITIONS._replace(speculative_tokens=1)
        for factor in failed:
            record = {**conditions._asdict(), "rounds": record_of(last)}
            verdict = judge(measured(factor), conditions, thresholds_for(conditions, None, NO_LIMITS), record)
            failed[factor] += verdict.reason == "below_last_good"
    assert failed[1.0] == 0
    assert failed[0.9] / trials <= 1 - CONFIDENCE
    assert failed[0.7] == trials


NO_LIMITS = {"fail_length": 0, "fail_position_0": 0, "warn_length": 0, "warn_position_0": 0}
