"""The result of a check: one row for each setting, and the first difference with its cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one setting.

    Args:
        outcome: ``"same"`` or ``"differs"``, compared with the reference. ``"failed"``: it raised.
            ``"skipped"``: the factory or the loader does not support it.
        note: The reason, for the last two.
    """

    setting: str
    outcome: str
    digest: str = ""
    num_batches: int = 0
    num_samples: int = 0
    took_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The likely cause of a difference, and a fix.

    Args:
        code: ``time``, ``address``, ``unseeded``, ``worker-seeds``, ``worker-state``,
            ``worker-order``, ``arrival-order``, ``repeated-stream``, ``hash-order``, ``process``,
            ``kept-state``, ``resume`` or ``unknown``.
        evidence: Results of the runs that support it.
    """

    code: str
    text: str
    cure: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first sample that differs.

    Args:
        one, other: The two settings.
        row: The sample within the batch. None if the whole batch differs or is missing.
        field: Its path in the sample, such as ``['image']``.
        left, right: The two values, shortened.
        how: How they differ.
    """

    one: str
    other: str
    epoch: int
    batch: int
    row: int | None = None
    field: str = ""
    left: str = ""
    right: str = ""
    how: str = ""
    cause: Cause = Cause(code="unknown", text="unknown")

    def __str__(self) -> str:
        row = "" if self.row is None else f", sample {self.row}"
        place = f", field {self.field}" if self.field else ""
        lines = [
            f"First difference: epoch {self.epoch}, batch {self.batch}{row}{place}: {self.how}",
            f"  {self.one}: {self.left}" if self.left else "",
            f"  {self.other}: {self.right}" if self.right else "",
            f"  likely: {self.cause.text} ({self.cause.code})",
            *(f"    {line}" for line in self.cause.evidence),
            f"  try: {self.cause.cure}" if self.cause.cure else "",
        ]
        return "\n".join(line for line in lines if line)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of comparing a loader's batches under every setting. True if all are the same.

    Example:
        >>> verdict = Verdict(rows=(Row(setting="0 workers", outcome="same", digest="ab12"),))
        >>> bool(verdict), verdict.is_same
        (True, True)
        >>> print(verdict)
        setting    outcome  batches  samples  seconds  hash
        0 workers  same           0        0      0.0  ab12
        <BLANKLINE>
        The same bits under every setting.
    """

    rows: tuple[Row, ...]
    difference: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """True if no setting differs and none failed."""
        return all(row.outcome in ("same", "skipped") for row in self.rows)

    def __bool__(self) -> bool:
        return self.is_same

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "is_same": self.is_same,
            "rows": [asdict(row) for row in self.rows],
            "difference": None if self.difference is None else asdict(self.difference),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Verdict:
        """Return the verdict that :meth:`to_dict` described."""
        difference = values["difference"]
        if difference is not None:
            cause = {**difference["cause"], "evidence": tuple(difference["cause"]["evidence"])}
            difference = Difference(**{**difference, "cause": Cause(**cause)})
        return cls(
            rows=tuple(Row(**row) for row in values["rows"]),
            difference=difference,
            notes=tuple(values["notes"]),
        )

    def __str__(self) -> str:
        lines = [*_table(self.rows), "", *self.notes]
        if self.difference is not None:
            lines.append(str(self.difference))
        elif self.is_same:
            num_skipped = sum(row.outcome == "skipped" for row in self.rows)
            lines.append(
                "The same bits under every setting."
                if not num_skipped
                else f"The same bits under the {len(self.rows) - num_skipped} settings that were "
                f"run. {num_skipped} {'was' if num_skipped == 1 else 'were'} skipped."
            )
        elif any(row.outcome == "differs" for row in self.rows):
            lines.append("The bits differ.")
        else:
            lines.append("No difference was found, but some settings could not be run.")
        return "\n".join(lines)


def describe_error(error: Exception) -> str:
    """Return the class and first line of an exception, for a row's note.

    Example:
        >>> describe_error(ValueError("no such file"))
        'ValueError: no such file'
    """
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def _table(rows: tuple[Row, ...]) -> list[str]:
    width = max(len("setting"), *(len(row.setting) for row in rows))
    heading = "outcome  batches  samples  seconds  hash"
    lines = [f"{'setting'.ljust(width)}  {heading}"]
    for row in rows:
        line = f"{row.setting.ljust(width)}  {row.outcome:<7}"
        if row.outcome in ("same", "differs"):
            numbers = f"{row.num_batches:>7}  {row.num_samples:>7}  {row.took_s:>7.1f}"
            line += f"  {numbers}  {row.digest}"
        lines.append(f"{line}  {row.note}".rstrip())
    return lines
