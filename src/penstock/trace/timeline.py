"""``penstock.Timeline``: a trace as a drawing, an HTML page, a file, totals and a diagnosis.

Called in the training process (``loader.timeline()``) and by the command line.

Tested by ``tests/unit/trace/test_accounting.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from penstock.errors import BadTrace
from penstock.trace import files
from penstock.trace import html as render_html
from penstock.trace import perfetto as render_perfetto
from penstock.trace import terminal as render_terminal
from penstock.trace.accounting import Account, make_account
from penstock.trace.diagnosis import Diagnosis, diagnose
from penstock.trace.model import Lane, TraceModel, make_model
from penstock.trace.simulator import predict_rate


class Timeline:
    """Timeline of a run. ``loader.timeline()`` returns one, and :meth:`load` reads one from a file.

    Args:
        records: The records of a loader or a trace file.

    Example:
        >>> from penstock import DataLoader
        >>> loader = DataLoader(range(64), batch_size=8)
        >>> for batch in loader:
        ...     pass
        >>> timeline = loader.timeline()
        >>> timeline.num_batches
        8
        >>> timeline.verdict.sentence[:32]
        'Too short to judge: 8 batches in'
    """

    def __init__(self, records: Mapping[str, Any]) -> None:
        self._records = records

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a trace file.

        Raises:
            BadTrace: The file is not a trace, or is damaged.
        """
        return cls(files.read_records(path))

    @cached_property
    def model(self) -> TraceModel:
        """Lanes, spans and curves."""
        return make_model(self._records)

    @cached_property
    def account(self) -> Account:
        """The totals of the run."""
        return make_account(self.model)

    @cached_property
    def verdict(self) -> Diagnosis:
        """The bottleneck of the run in one sentence, with evidence and a remedy."""
        return diagnose(self.account, self.facts, partial(predict_rate, self.model))

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the loader and the machine."""
        return self.model.facts

    @property
    def lanes(self) -> list[Lane]:
        return self.model.lanes

    @property
    def num_batches(self) -> int:
        return self.account.num_batches

    def draw(self, width: int = 100, *, colour: bool = False) -> str:
        """Return the drawing for a terminal, as text."""
        return render_terminal.draw(self.model, width, colour=colour)

    def show(self) -> None:
        """Print the drawing, as wide as the window, and the verdict."""
        from rich.console import Console

        console = Console()
        drawing = render_terminal.render(self.model, console.width)
        render_terminal.print_run(console, drawing, self.say())

    def say(self) -> str:
        """Return the verdict and the notes about the trace, as text."""
        return "\n".join([str(self.verdict), *(f"Note: {note}" for note in self.model.notes)])

    def to_html(self) -> str:
        """Return a self-contained HTML page. It needs no network and no other file."""
        return render_html.render(self.model, self.verdict)

    def to_perfetto(self) -> dict[str, Any]:
        """Return the trace in Chrome's trace-event format, for Perfetto and other viewers."""
        return render_perfetto.render(self.model)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to a file.

        The format follows the name: ``.html`` is the page, ``.perfetto.json`` and
        ``.perfetto.json.gz`` are Chrome's format, other ``.json`` and ``.json.gz`` names are
        trace files.
        """
        name = os.fspath(path)
        if name.endswith(".html"):
            files.write_whole(self.to_html().encode(), name)
        elif ".perfetto.json" in name:
            files.write_whole(render_perfetto.dump(self.model), name)
        elif name.endswith((".json", ".json.gz")):
            files.write_records(self._records, name)
        else:
            raise BadTrace(
                f"{name} must end in .html, .json, .json.gz or .perfetto.json.gz",
                remedy="timeline.save('run.html')",
            )

    def __repr__(self) -> str:
        return (
            f"Timeline({self.num_batches} batches, {len(self.lanes)} lanes, "
            f"{self.model.num_spans:,} spans)"
        )

    def __str__(self) -> str:
        return f"{self.draw()}\n{self.verdict}"

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return render_html.frame(self.to_html())
