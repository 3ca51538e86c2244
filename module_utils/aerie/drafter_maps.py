# SPDX-License-Identifier: Apache-2.0
"""Whether the maps between the draft vocabulary and the target's are there, of their lengths, in range and consistent.

d2t: the draft id i stands for the target id i + d2t[i]. t2d: which target ids have a draft id.
"""

from __future__ import annotations

from collections.abc import Iterator

from ansible.module_utils.aerie.drafter import Drafter
from ansible.module_utils.aerie.drafter_fit import Service, Target
from ansible.module_utils.aerie.findings import ERROR, Fact, Finding
from ansible.module_utils.aerie.safetensors_header import SafetensorsError, read_small_tensor


def check_vocabulary_maps(drafter: Drafter, target: Target, service: Service) -> Iterator[Finding]:
    """Check d2t (draft id i stands for the target id i + d2t[i]) and t2d (which target ids have a draft id)."""
    d2t, t2d = drafter.checkpoint.tensor("d2t"), drafter.checkpoint.tensor("t2d")
    sizes = (drafter.declares("draft_vocab_size"), drafter.declares("vocab_size"))
    if drafter.draft_vocab_size >= drafter.vocab_size:
        if d2t is not None and drafter.draft_vocab_size == drafter.vocab_size:
            yield Finding(
                "d2t_unexpected",
                ERROR,
                (drafter.stored("d2t shape", list(d2t.shape), "d2t"), *sizes[:1]),
                "vLLM has no place for a d2t when the draft vocabulary is the whole vocabulary",
                "remove d2t and t2d from a copy of the drafter",
            )
        return
    if d2t is None:
        yield Finding(
            "d2t_missing",
            ERROR,
            sizes,
            f"{drafter.root} has no d2t, so the draft ids would be taken for target ids",
            "choose weights that hold d2t",
        )
        return
    if d2t.shape != (drafter.draft_vocab_size,):
        yield Finding(
            "d2t_length",
            ERROR,
            (drafter.stored("d2t shape", list(d2t.shape), "d2t"), sizes[0]),
            "d2t must have one entry per token of the draft vocabulary",
            "choose weights and config.json of one revision",
        )
        return
    if t2d is not None and t2d.shape != (drafter.vocab_size,):
        yield Finding(
            "t2d_length",
            ERROR,
            (drafter.stored("t2d shape", list(t2d.shape), "t2d"), sizes[1]),
            "t2d must have one entry per token of the target",
            "choose weights and config.json of one revision",
        )
        t2d = None
    try:
        deltas = read_small_tensor(drafter.checkpoint.shards[drafter.checkpoint.tensors["d2t"]], "d2t")
        marks = read_small_tensor(drafter.checkpoint.shards[drafter.checkpoint.tensors["t2d"]], "t2d") if t2d else None
    except SafetensorsError as error:
        fact = Fact("d2t and t2d", "unreadable", str(error.path))
        yield Finding("vocabulary_map", ERROR, (fact,), error.problem, "choose weights whose d2t is int64 and t2d bool")
        return
    drafted = None if marks is None else {token for token, mark in enumerate(marks) if mark}
    yield from _check_map_contents(drafter, deltas, drafted)


def _check_map_contents(drafter: Drafter, deltas: list[int], drafted: set[int] | None) -> Iterator[Finding]:
    """Check the target ids that ``deltas`` lead to, and that they are the ``drafted`` ones that t2d marks."""
    ids = [draft + delta for draft, delta in enumerate(deltas)]
    last = len(ids) - 1
    if _holds_target_ids(deltas, ids, drafted, drafter.vocab_size):
        yield Finding(
            "d2t_absolute",
            ERROR,
            (
                drafter.stored(f"d2t[{last}] + {last} =", ids[last], "d2t"),
                drafter.stored("the entry", deltas[last], "d2t"),
            ),
            "d2t holds target ids, and vLLM adds the draft id to each",
            "subtract 0, 1, 2, ... from d2t in a copy of the drafter",
        )
        return
    outside = next((draft for draft, token in enumerate(ids) if not 0 <= token < drafter.vocab_size), None)
    if outside is not None:
        yield Finding(
            "d2t_range",
            ERROR,
            (
                drafter.stored(f"d2t[{outside}] + {outside} =", ids[outside], "d2t"),
                drafter.declares("vocab_size"),
            ),
            "d2t leads outside the vocabulary",
            "choose a drafter made for this target, or repair d2t",
        )
        return
    first_draft: dict[int, int] = {}
    for draft, token in enumerate(ids):
        other = first_draft.setdefault(token, draft)
        if other != draft:
            yield Finding(
                "d2t_duplicate",
                ERROR,
                (
                    drafter.stored(f"d2t[{other}] + {other} =", token, "d2t"),
                    drafter.stored(f"d2t[{draft}] + {draft} =", token, "d2t"),
                ),
                "two draft ids stand for one target id",
                "repair d2t, or choose a drafter made for this target",
            )
            return
    if drafted is not None and len(drafted) != drafter.draft_vocab_size:
        yield Finding(
            "t2d_count",
            ERROR,
            (
                drafter.stored("number of tokens marked by t2d", len(drafted), "t2d"),
                drafter.declares("draft_vocab_size"),
            ),
            "t2d must mark as many tokens as the draft vocabulary has",
            "choose d2t, t2d and config.json of one training run",
        )
    elif drafted is not None and drafted != first_draft.keys():
        token = min(drafted.symmetric_difference(ids))
        yield Finding(
            "t2d_mismatch",
            ERROR,
            (
                drafter.stored(f"t2d[{token}]", token in drafted, "t2d"),
                drafter.stored(f"number of d2t entries for token {token}:", int(token in first_draft), "d2t"),
            ),
            "d2t and t2d describe two vocabularies",
            "choose d2t and t2d of one training run",
        )


def _holds_target_ids(deltas: list[int], ids: list[int], drafted: set[int] | None, vocab_size: int) -> bool:
    """Tell whether d2t's entries are target ids themselves, rather than differences that lead to ``ids``."""
    if drafted is not None:
        return set(deltas) == drafted and set(ids) != drafted
    return ids[-1] >= vocab_size > deltas[-1] and all(low < high for low, high in zip(deltas, deltas[1:]))
