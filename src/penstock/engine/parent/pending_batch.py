"""One batch under way: the parts it was cut into, and what came back for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.engine.memory.messages import Reply
from penstock.engine.memory.ring import Ring, Slot
from penstock.engine.parent.opening import open_fixed, open_payload
from penstock.engine.pickling.exceptions import ErrorReport


@dataclass(eq=False)
class PendingBatch:
    """One batch under way."""

    epoch: int
    number: int
    index: Any
    position: int
    rows: int
    slot: Slot
    parts: list[tuple[int, int]] = field(default_factory=list)
    """First and (exclusive) last row of each part."""
    replies: dict[int, Reply] = field(default_factory=dict)
    layouts: dict[int, Any] = field(default_factory=dict)
    worker: int = -1
    """Who answered for the first part."""
    is_done: bool = False
    bad: list[Any] = field(default_factory=list)
    """What was wrong with samples of it."""
    _has_error: bool = False

    def take(self, worker: int, reply: Reply, layout: Any) -> None:
        """A worker has answered for a part; ``layout``: of what it wrote into the slot."""
        self.replies[reply.part] = reply
        if layout is not None:
            self.layouts[reply.part] = layout
        if reply.part == 0:
            self.worker = worker
        if reply.kind == "error":
            self._has_error = True
        if reply.bad:
            self.bad = sorted([*self.bad, *reply.bad], key=lambda found: found.position)

    @property
    def is_complete(self) -> bool:
        return len(self.replies) == len(self.parts)

    @property
    def kind(self) -> str:
        return self.replies[0].kind

    @property
    def must_be_redone(self) -> bool:
        """Parts that do not fit together (or did not fit the slot) are loaded again as a whole."""
        if len(self.parts) == 1:
            return False
        kinds = {reply.kind for reply in self.replies.values()}
        if "error" in kinds:
            return False
        return kinds != {"fixed"} or len(set(self.layouts.values())) > 1

    def make_whole(self) -> None:
        """Begin again, in one part."""
        self.parts, self.replies, self.layouts, self.bad = [(0, self.rows)], {}, {}, []

    @property
    def error(self) -> ErrorReport | None:
        """The first part's that failed."""
        for _, reply in sorted(self.replies.items()) if self._has_error else ():
            if reply.kind == "error":
                return reply.content  # type: ignore[no-any-return]
        return None

    def open(self, ring: Ring) -> tuple[Any, bool]:
        """The batch as the user sees it, and whether its slot is in use from now on."""
        if self.kind == "payload":
            return open_payload(ring, self.slot, self.replies[0])
        contents = [self.replies[part].content for part in range(len(self.parts))]
        return open_fixed(ring, self.slot, self.rows, self.layouts[0], contents, self.parts), True
