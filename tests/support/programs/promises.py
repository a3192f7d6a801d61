"""The combinations that the documentation excludes, each with the excluding sentence.

:func:`settle` turns any record into a valid program that the documentation covers: excluded
settings get their defaults. The functions at the end say which comparisons a program allows. All
exceptions of this package are in this module.
"""

from __future__ import annotations

from support.programs import parts
from support.programs.record import Program

EXCEPTIONS: dict[str, tuple[str, str]] = {
    "out of order": ("explain/order.md", "(`in_order=False` gives that up)"),
    "one death": ("faults.md", "A sample that loads is cleared."),
    "worker seeds after a loss": (
        "faults.md",
        "Not guaranteed: the new worker starts from the seed of the lost one.",
    ),
    "iterable datasets": (
        "compatibility.md",
        'An iterable dataset has no positions, so its `randomness` is `"worker"`.',
    ),
    "streams go round": (
        "compatibility.md",
        "whole batches are distributed round-robin as in PyTorch",
    ),
    "streams in threads": ("compatibility.md", "An iterable dataset gets one thread"),
    "threads without seeds": (
        "compatibility.md",
        "nothing is seeded, so the numbers are not repeatable",
    ),
    "draws beside threads": (
        "compatibility.md",
        "while the threads load, the numbers of both are not repeatable",
    ),
    "one dataset in threads": (
        "compatibility.md",
        "All threads use one dataset, which must be thread-safe.",
    ),
    "later epochs without a seed": (
        "reproducibility.md",
        "resumes the epoch in progress. Later epochs draw new numbers",
    ),
    "samplers asked again": (
        "reproducibility.md",
        "Other samplers are iterated from their first index",
    ),
    "samples unlike": ("compatibility.md", "Samples that do not stack raise [S01]"),
    "dataclasses": ("compatibility.md", "also takes dataclasses"),
    "unseeded generators": (
        "compatibility.md",
        "nor are generators that a sample creates without a seed",
    ),
    "persistent workers": (
        "compatibility.md",
        "`persistent_workers=True` gives different numbers from `False` from the second epoch on",
    ),
    "what is stored": (
        "packed-sets.md",
        "what is random in a sample is frozen with",
    ),
}
"""Each exception with its page and its sentence. A test checks that the page has the sentence."""


def settle(program: Program) -> Program:
    """Return the nearest valid program that the documentation covers fully."""
    for rule in RULES:
        program = rule(program)
    return program


# -- invalid combinations --------------------------------------------------------------------------


def _source_rules(p: Program) -> Program:
    if p.source != "made":
        p = p.having(wraps=tuple(wrap for wrap in p.wraps if wrap != "getitems"))
    if p.source not in ("made", "iterable"):
        p = p.having(draws=(), bad=(), sample_ms=0)
    if p.source in ("range", "tensors"):
        p = p.having(form="int")
    if p.source == "iterable":  # no indices and no length
        p = p.having(order="sequential", wraps=(), bad=(), seed=None)
        if p.form == "dataclass":  # the reference uses torch's collate function
            p = p.having(form="tuple")
    if p.source == "shared_dict":  # a mapping, which torch's wrappers index like a list
        p = p.having(wraps=())
    if "stack" in p.wraps and not hasattr(parts.torch.utils.data, "StackDataset"):
        p = p.having(wraps=tuple(wrap for wrap in p.wraps if wrap != "stack"))
    if "stack" in p.wraps and p.bad_kind == "none":  # a tuple of two None is not None
        p = p.having(bad_kind="raises")
    p = p.having(bad=tuple(index for index in p.bad if index < p.length))
    return p if p.bad else p.having(bad=(), bad_kind="raises", on_error="raise")


def _storing_rules(p: Program) -> Program:
    """Apply "what is stored". Packed sets and caches take plain values, and at least one sample."""
    storing = [wrap for wrap in p.wraps if wrap in parts.STORING]
    if not storing:
        return p
    is_nested = p.wraps.index(storing[0]) != 0 or bool(p.draws)
    if p.length < 4 or p.form not in parts.PACKABLE or p.bad or is_nested or len(storing) > 1:
        return p.having(wraps=tuple(wrap for wrap in p.wraps if wrap not in parts.STORING))
    return p


def _batch_rules(p: Program) -> Program:
    if p.order in parts.BATCH_ORDERS:
        # Without automatic batching there is no last batch to drop.
        p = p.having(batch_size=p.batch_size or 2, seed=None)
        if p.order in ("batches", "batch list"):
            p = p.having(drop_last=False, batch_size=2)
    if p.batch_size is None:
        p = p.having(drop_last=False, collate="default")
        if p.bad:
            p = p.having(bad=(), bad_kind="raises", on_error="raise")
    if p.length < 4 and p.order != "sequential":
        p = p.having(order="sequential")  # torch rejects empty samplers, and wrappers shrink it
    if p.length < 8 and any(wrap in ("subset", "split") for wrap in p.wraps):
        p = p.having(wraps=())
    stacks = p.collate in ("default", "draws") and p.batch_size is not None
    if stacks and (p.form in parts.RAGGED or (p.form == "dataclass" and p.collate == "draws")):
        p = p.having(collate="list")
    if p.changes_batches and p.collate != "default":
        p = p.having(changes_batches=False)  # a list can hold the dataset's own objects
    if p.changes_batches and p.batch_size is None:
        p = p.having(changes_batches=False)
    return p


def _loop_rules(p: Program) -> Program:
    if p.num_workers == 0:
        p = p.having(pool="auto", start_method=None, prefetch_factor=None, persistent_workers=False)
    if p.pool == "thread":
        p = p.having(start_method=None)
    if p.pool == "thread" or p.num_workers in (0, "auto"):
        p = p.having(events=p.events_of("fork", "break", "resume"))
    if p.num_workers == "auto":
        p = p.having(prefetch_factor=None)
    # "one death"
    first_kill = p.events_of("kill", "kill_server")[:1]
    resumes = p.events_of("resume")[:1]
    breaks = p.events_of("break")[:1] if not resumes else ()
    p = p.having(events=p.events_of("fork")[:2] + first_kill + breaks + resumes)
    return p.having(events=tuple(event for event in p.events if event[1] < p.epochs))


# -- exclusions by the documentation ---------------------------------------------------------------


def _order_rules(p: Program) -> Program:
    """Apply "out of order": which batches come first is unspecified."""
    if not p.in_order:
        p = p.having(events=p.events_of("fork", "kill", "kill_server"))
        if p.source == "iterable":
            p = p.having(draws=())
    return p


def _worker_randomness_rules(p: Program) -> Program:
    """Apply "iterable datasets", "worker seeds after a loss" and "threads without seeds"."""
    if p.source != "iterable" and p.randomness == "sample":
        return p
    p = p.having(draws=tuple(name for name in p.draws if name in parts.GLOBAL_DRAWS))
    if p.collate in ("draws", "held"):
        p = p.having(collate="list")
    disturbed = p.events_of("kill", "kill_server", "break", "resume")
    if disturbed or p.pool == "thread" or p.num_workers == "auto" or p.bad or not p.in_order:
        p = p.having(draws=())
    return p


def _thread_rules(p: Program) -> Program:
    """Apply "draws beside threads" and "one dataset in threads"."""
    if p.pool != "thread":
        return p
    return p.having(draws_between=False, worker_init="")


def _resume_rules(p: Program) -> Program:
    """Apply "later epochs without a seed" and "samplers asked again"."""
    resumes = p.events_of("resume")
    if not resumes:
        return p
    (_, epoch, batch, num_workers) = resumes[0]
    others = tuple(event for event in p.events if event not in resumes)
    if p.source == "iterable":  # docs/reproducibility.md covers indices only
        return p.having(events=others)
    if p.order == "weighted generator":
        epoch, p = 0, p.having(epochs=1)
    if p.seed is None:
        p = p.having(epochs=epoch + 1)
    others = tuple(event for event in others if event[1] < p.epochs)
    return p.having(events=(*others, ("resume", epoch, batch, num_workers)))


# -- open defects ----------------------------------------------------------------------------------
# Each defect is excluded until it is fixed, so that others can be found. Remove it with the defect.


def _open_defects(p: Program) -> Program:
    # When the loop breaks, the user's generator shows how far a sampler ran ahead, as in torch.
    if p.events_of("break") and p.order in ("shuffle generator", "batch sampler", "replacement"):
        p = p.having(events=tuple(event for event in p.events if event[0] != "break"))
    return p


RULES = (
    _source_rules,
    _storing_rules,
    _batch_rules,
    _loop_rules,
    _order_rules,
    _worker_randomness_rules,
    _thread_rules,
    _resume_rules,
    _open_defects,
)


# -- which comparisons a program allows ------------------------------------------------------------


def belongs_to_worker(p: Program) -> bool:
    """Return True if the draws of samples depend on the worker."""
    return p.source == "iterable" or p.randomness == "worker"


def has_torch_reference(p: Program) -> bool:
    """Return True if torch's own loader can run it.

    Exceptions: "dataclasses", "samples unlike", and ``on_error``, which torch does not have.
    """
    is_default = p.collate == "default" and p.batch_size is not None
    if is_default and (p.form == "dataclass" or (p.bad and p.bad_kind == "none")):
        return False
    return p.on_error == "raise"


def keeps_user_generators(p: Program) -> bool:
    """Return True if the loop's own draws equal those of a loop without workers.

    Exception: "draws beside threads". A loader that resumes draws one more base seed.
    """
    return p.pool != "thread" and not p.events_of("resume")


def draws_differ(p: Program) -> bool:
    """Return True if any two samples of the run must draw different numbers."""
    repeats = any(name in parts.REPEATING_DRAWS for name in p.draws)
    return bool(p.draws) and not repeats and not belongs_to_worker(p) and not p.bad
