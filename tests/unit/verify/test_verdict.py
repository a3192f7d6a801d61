"""A verdict can be used as a condition, and converted to JSON and text."""

from __future__ import annotations

import json

import pytest

from penstock.verify.verdict import Cause, Difference, Row, Verdict

pytestmark = pytest.mark.legacy

SAME = Row(setting="0 workers", outcome="same", digest="ab", num_batches=3, num_samples=12)
SKIPPED = Row(setting="2 threads", outcome="skipped", note="no pool")
DIFFERS = Row(setting="2 workers", outcome="differs", digest="cd")
FAILED = Row(setting="5 workers", outcome="failed", note="OSError: no")


@pytest.mark.parametrize(
    ("rows", "is_same"),
    [((SAME, SKIPPED), True), ((SAME, DIFFERS), False), ((SAME, FAILED), False)],
)
def test_a_verdict_is_true_only_if_nothing_differs_and_nothing_failed(
    rows: tuple[Row, ...], is_same: bool
) -> None:
    assert bool(Verdict(rows=rows)) is Verdict(rows=rows).is_same is is_same


def test_settings_that_were_skipped_are_not_claimed() -> None:
    assert str(Verdict(rows=(SAME, SAME))).endswith("The same bits under every setting.")
    skipped = str(Verdict(rows=(SAME, SAME, SKIPPED)))
    assert skipped.endswith("The same bits under the 2 settings that were run. 1 was skipped.")
    assert "every setting" not in skipped


def test_a_verdict_survives_json_and_says_all() -> None:
    cause = Cause(code="time", text="it is the clock", cure="no clock", evidence=("seen twice",))
    difference = Difference(
        one="0 workers",
        other="2 workers",
        epoch=1,
        batch=2,
        row=3,
        field="['t']",
        left="1",
        right="2",
        how="other numbers",
        cause=cause,
    )
    verdict = Verdict(rows=(SAME, DIFFERS), difference=difference, notes=("a note",))
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    for words in ("epoch 1, batch 2, sample 3, field ['t']", "the clock", "seen twice", "no clock"):
        assert words in str(verdict)
