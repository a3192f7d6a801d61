"""Interleaves sources in proportion to their weights, as a function of the term number.

Term n of the sequence belongs to the source in whose interval the number x(n) falls. The intervals
divide [0, 1), and each is as long as the source's share. x(n) is the van der Corput sequence: the
digits of n in a prime base b, reversed behind the point.

    n      0    1     2     3     4     5        base 3
    x(n)   .0   .1    .2    .01   .11   .21
           A    A     C     A     B     C        A [0, 0.4), B [0.4, 0.6), C [0.6, 1)

Ranks take parts of a global batch of G samples. Each part must have every source's share, and not
only the whole (A B A B ... dealt to two ranks would give each rank one source). So positions in a
batch are permuted: slot i takes term :func:`slot_terms` ``[i]`` of the batch, the digits of i in
the mixed base of the prime factors of G, reversed. Both together are the points of a Halton
sequence. Its coordinates are independent, because b does not divide G.

Bound. A *run* is m terms n, n + d, n + 2d, ... where b does not divide d. In a run of b**j terms,
each residue modulo b**j occurs once, so each interval of length b**-j that begins at a multiple of
b**-j holds exactly one x. Let e be the number of terms of such a run with x in [0, t), minus
t * b**j. It is -f or 1 - f, where f is the fractional part of t * b**j.

    Let V(j) be the largest |error of the first m terms - e / 2| over runs of b**j terms and all m.
    The run is b runs of b**(j-1) terms, with errors e[0], e[1], ... If the first m terms end in the
    a-th, their error minus e / 2 is (e[0] + ... + e[a-1]) / 2 - (e[a+1] + ... + e[b-1]) / 2 plus a
    term of at most V(j-1). Each e[k] is -f or 1 - f with the f of j - 1, and the number u of the
    latter is b * f rounded down or up, because the errors sum to e. So the first part is at most
    c = (b*b - b + 2) / (4*b), the value for a = u = (b + 1) / 2 (b = 2: a = u = 1).
    With V(0) = 1/2, V(j) <= 1/2 + c*j, and the error of m <= b**j terms is at most 1 + c*j.

An interval [s, t) has two ends, so in a run of m terms each source's count is within

    count_bound(m, b) = 2 + 2*c*ceil(log_b(m))         base 2: 2 + log2(m), base 3: 2 + 1.33 log3(m)

of its share. Measured over 50,000 terms, it is within 4 to 6. Shares are multiples of b**-D
(:attr:`Interleaving.num_digits`), so runs of b**D terms are exact, and the bound stops growing
there. If the weights change, each part with its own weights is a run. Every range of positions is a
small number of runs:

- whole global batches: one run.
- a rank's part of all global batches: one run if the number of ranks is a product of the smallest
  prime factors of G (a power of two, for example). Slots that share their leading digits have terms
  d apart, where d is the product of the primes of these digits.
- any range of slots, in one batch or in all: :func:`num_runs`, at most 2 * (p - 1) for each prime
  factor p of G.

Only integers are used. A term takes time in proportion to the logarithm of the number of sources
and to the number of digits. Memory is in proportion to the number of sources.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from penstock.order.keys import GOLDEN

if TYPE_CHECKING:
    import numpy.typing as npt

    Terms = npt.NDArray[np.int64]

UNIT_BITS = 32
"""Shares are multiples of the smallest power b**-D that is at least 2**-UNIT_BITS."""
MAX_TERM = 1 << 61


class Interleaving:
    """An endless sequence of sources in proportion to their weights.

    Args:
        changes: Pairs of a term and the weights from that term on. The first term is 0.
        group: Size of a global batch. The base of the sequence does not divide it.

    Example:
        >>> sequence = Interleaving([(0, [Fraction(1), Fraction(3)])], group=4)
        >>> sequence.sources_at(np.arange(9)).tolist()
        [1, 1, 0, 1, 1, 0, 1, 1, 0]
        >>> sequence.turns_at(np.array([8]), np.array([1])).tolist()  # 6 terms of source 1 before 8
        [6]
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[Fraction]]], group: int) -> None:
        self.base = prime_not_dividing(group)
        self.num_digits = 1
        while self.base ** (self.num_digits + 1) <= 1 << UNIT_BITS:
            self.num_digits += 1
        self.unit = self.base**self.num_digits
        # Every run has the same bound. But from x = 0 on, the first sources are always ahead of
        # their share and the last ones behind, so the sequence begins elsewhere.
        self._shift = self.unit * GOLDEN >> 64
        self.starts = np.array([term for term, _ in changes], dtype=np.int64)
        self.parts = np.array([to_parts(weights, self.unit) for _, weights in changes], np.int64)
        """Share of each source in units, by change."""
        self._ends = np.cumsum(self.parts, axis=1)
        self._digits = [self._split_digits(ends) for ends in self._ends]
        self._offsets = self._compute_offsets()

    def _split_digits(self, ends: Terms) -> npt.NDArray[np.uint32]:
        """Return the digits of 0 and of each end, first digit first: one row for each digit."""
        rest = np.concatenate([[0], ends])
        found = np.empty((self.num_digits, len(rest)), np.uint32)
        for place in range(self.num_digits):
            found[place], rest = np.divmod(rest, self.unit // self.base ** (place + 1))
        return found  # the end of the last source is the digit b, then zeros

    def _compute_offsets(self) -> list[Terms]:
        """Return what to add to the counts of each change, so that turns continue over changes."""
        offsets = [-self._count_all(0, 0)]
        for number in range(1, len(self.starts)):
            start = int(self.starts[number])
            before, after = self._count_all(number - 1, start), self._count_all(number, start)
            offsets.append(offsets[-1] + before - after)
        return offsets

    def _count_all(self, change: int, term: int) -> Terms:
        sources = np.arange(self.parts.shape[1])
        return self._count(change, np.full(len(sources), term, np.int64), sources)

    def _count(self, change: int, terms: Terms, sources: Terms) -> Terms:
        """Return how many terms before ``terms`` have an x in the interval of the given source.

        The count includes the terms before the sequence begins, which the offsets subtract.
        """
        periods, rest = np.divmod(terms + self._shift, self.unit)
        rest, digits = rest.astype(np.uint32), self._digits[change]
        below = self._count_below(rest, digits.take(sources, axis=1)).astype(np.int64)
        below_end = self._count_below(rest, digits.take(sources + 1, axis=1))
        found: Terms = periods * self.parts[change][sources] + below_end - below
        return found

    def _count_below(
        self, terms: npt.NDArray[np.uint32], digits: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.uint32]:
        """Return how many terms before ``terms`` have an x below the number with these digits.

        The last digit of n is the first one of x(n). Terms with a smaller one are below, and those
        with the same one are decided by the rest of the digits: n // b.
        """
        found, base = np.zeros(len(terms), np.uint32), np.uint32(self.base)
        for digit in digits:
            quotient = terms // base
            rest = terms - quotient * base
            found += quotient * digit
            found += np.minimum(rest, digit)
            terms = quotient + (rest > digit)
        return found

    def _change_at(self, terms: Terms) -> list[tuple[int, npt.NDArray[np.bool_] | slice]]:
        """Return the changes in force at ``terms``, and which of the terms each applies to."""
        if len(self.starts) == 1:
            return [(0, slice(None))]
        changes = np.searchsorted(self.starts, terms, side="right") - 1
        return [(change, changes == change) for change in np.unique(changes).tolist()]

    def draw(self, terms: Terms) -> tuple[Terms, Terms]:
        """Return the source of each term, and the number of that source's terms before it."""
        first, last = (int(terms.min()), int(terms.max()) + 1) if len(terms) else (0, 0)
        num_sources = self.parts.shape[1]
        if last - first > 4 * len(terms) or num_sources > 32:
            sources = self.sources_at(terms)
            return sources, self.turns_at(terms, sources)
        # A few sources have all terms of a range: counting them takes a third of the time.
        sources = self.sources_at(np.arange(first, last, dtype=np.int64))
        turns = np.empty(last - first, np.int64)
        for source in range(num_sources):
            (own,) = np.nonzero(sources == source)
            turns[own] = np.arange(len(own))
        turns += self.counts(first)[sources]
        return sources[terms - first], turns[terms - first]

    def sources_at(self, terms: Terms) -> Terms:
        """Return the source of each term."""
        low = self.num_digits // 2
        first, second = self.base**low, self.base ** (self.num_digits - low)
        quotient = (terms + self._shift) // first
        heights = _reversed_digits(self.base, low)[terms + self._shift - quotient * first] * second
        heights += _reversed_digits(self.base, self.num_digits - low)[quotient % second]
        found = np.empty(len(terms), np.int64)
        for change, chosen in self._change_at(terms):
            found[chosen] = np.searchsorted(self._ends[change], heights[chosen], side="right")
        return found

    def turns_at(self, terms: Terms, sources: Terms) -> Terms:
        """Return how many terms of the given source come before each term."""
        found = np.empty(len(terms), np.int64)
        for change, chosen in self._change_at(terms):
            own = sources[chosen]
            found[chosen] = self._count(change, terms[chosen], own) + self._offsets[change][own]
        return found

    def counts(self, term: int) -> Terms:
        """Return how many terms of each source come before ``term``."""
        change = int(np.searchsorted(self.starts, term, side="right")) - 1
        return self._count_all(change, term) + self._offsets[change]

    def find_turn(self, source: int, turn: int) -> int:
        """Return the term at which ``source`` has its turn. The inverse of :meth:`turns_at`."""
        low, high = 0, MAX_TERM  # the turn is at low or later, and before high
        while high - low > 1:
            step = max(1, (high - low) // 64)
            terms = np.arange(low, high, step, dtype=np.int64)
            turns = self.turns_at(terms, np.full(len(terms), source))
            place = int(np.searchsorted(turns, turn, side="right"))
            low, high = int(terms[place - 1]), int(terms[place]) if place < len(terms) else high
        return low


def first_true(holds: Callable[[int], bool]) -> int:
    """Return the first term from which on ``holds(term)`` is true, or MAX_TERM."""
    low, high = 0, 1
    while high < MAX_TERM and not holds(high):
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def prime_not_dividing(number: int) -> int:
    """Return the smallest prime that does not divide ``number``.

    Example:
        >>> [prime_not_dividing(number) for number in (1, 64, 96, 60)]
        [2, 3, 5, 7]
    """
    candidate = 2
    while number % candidate == 0 or any(candidate % low == 0 for low in range(2, candidate)):
        candidate += 1
    return candidate


def prime_factors(number: int) -> list[int]:
    """Return the prime factors, smallest first.

    Example:
        >>> prime_factors(60)
        [2, 2, 3, 5]
    """
    found, factor = [], 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found + [number] * (number > 1)


@functools.lru_cache(maxsize=8)
def slot_terms(group: int) -> Terms:
    """Return the term of a global batch that each slot takes: digits of the slot, reversed.

    Example:
        >>> slot_terms(8).tolist(), slot_terms(6).tolist()
        ([0, 4, 2, 6, 1, 5, 3, 7], [0, 2, 4, 1, 3, 5])
    """
    found, step = np.zeros(1, np.int64), 1
    for prime in prime_factors(group):
        found = (found[:, None] + step * np.arange(prime)).reshape(-1)
        step *= prime
    found.flags.writeable = False
    return found


def count_bound(num_terms: int, base: int) -> float:
    """Return how far a source's count in a run of ``num_terms`` terms can be from its share.

    Example:
        >>> count_bound(1, 2), count_bound(1024, 2), round(count_bound(1024, 3), 1)
        (2.0, 12.0, 11.3)
    """
    if not num_terms:
        return 0.0
    num_digits, power = 0, 1
    while power < num_terms and power * base <= 1 << UNIT_BITS:
        num_digits, power = num_digits + 1, power * base
    return 2 + num_digits * (base * base - base + 2) / (2 * base)


def num_runs(first: int, last: int, group: int, *, in_one_batch: bool = False) -> int:
    """Return the number of runs that slots ``first`` to ``last`` (exclusive) consist of.

    Args:
        in_one_batch: Slots of one global batch. Otherwise the same slots of many batches.

    Example:
        >>> num_runs(0, 8, 8), num_runs(4, 8, 8), num_runs(1, 8, 8)
        (1, 1, 3)
        >>> num_runs(0, 5, 7), num_runs(0, 5, 7, in_one_batch=True)
        (5, 1)
    """
    return _num_runs(first, last, group, prime_factors(group), in_one_batch)


def _num_runs(first: int, last: int, size: int, factors: list[int], in_one_batch: bool) -> int:
    """Count the runs in a block of ``size`` slots whose digits have the radices ``factors``."""
    first, last = max(first, 0), min(last, size)
    if first >= last:
        return 0
    if last - first == size or (in_one_batch and len(factors) == 1):
        return 1
    inner = size // factors[0]
    starts = range(first // inner * inner, last, inner)
    parts = (_num_runs(first - at, last - at, inner, factors[1:], in_one_batch) for at in starts)
    return sum(parts)


@functools.lru_cache(maxsize=16)
def _reversed_digits(base: int, num_digits: int) -> Terms:
    """Return the numbers below base**num_digits with their digits reversed: 0.1 to 0.6 MB."""
    found = np.zeros(1, np.int64)
    for _ in range(num_digits):
        found = np.concatenate([found * base + digit for digit in range(base)])
    found.flags.writeable = False
    return found


def to_parts(weights: Sequence[Fraction], unit: int) -> list[int]:
    """Divide ``unit`` in proportion to the weights.

    Each weight is an exact fraction. Shares are rounded down, and the units left over are given to
    the largest remainders, the first source first. A positive weight gets at least one unit, which
    the largest share gives up.

    Example:
        >>> to_parts([Fraction(1), Fraction(0), Fraction(2)], 100)
        [33, 0, 67]
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [weight.numerator * (scale // weight.denominator) for weight in weights]
    total = sum(whole)
    parts, remainders = zip(*(divmod(unit * part, total) for part in whole), strict=True)
    shares = list(parts)
    left = sorted(range(len(shares)), key=lambda place: -remainders[place])
    for place in left[: unit - sum(shares)]:
        shares[place] += 1
    missing = [place for place, weight in enumerate(whole) if weight and not shares[place]]
    largest = [(-share, place) for place, share in enumerate(shares)] if missing else []
    heapq.heapify(largest)
    for place in missing:
        share, giver = largest[0]
        heapq.heapreplace(largest, (share + 1, giver))
        shares[giver] -= 1
        shares[place] = 1
    return shares
