"""What a micro-batch costs, fitted to what micro-batches took: contract B4. Pure, and the same to the last bit on every
rank that sees the same numbers.

Least squares of seconds = a·tokens + b·pairs + c, where recent steps count most. Where the micro-batches don't tell
these apart (a good split makes all alike), the cost that was assumed before keeps its shape, by ridge regression
towards it. What ranks have seen adds up, so they need not see it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from allranks.batches.split import Cost

_DISCOUNT = 0.98
"""Weight of a step relative to the next one: the last 50 count."""

_PRIOR_WEIGHT = 0.25
"""Of the cost that was assumed, in observations."""

_LEAST = 0.01
"""Of what was assumed, that a token and a micro-batch cost at least: a split into ever more of them does not pay."""

_OUTLIER = 3.0
"""A micro-batch that took so many times what was expected tells of something else, as another process on the GPU."""

_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


@dataclass(frozen=True, kw_only=True)
class Work:
    """One micro-batch, as the cost counts it.

    Attributes:
        tokens: padding included.
        pairs: sum over the samples of their tokens², padding included.
    """

    tokens: int
    pairs: int

    def cost(self, cost: Cost) -> float:
        """In the unit of `cost`."""
        return cost.a * self.tokens + cost.b * self.pairs + cost.c


def work_of(lengths: Sequence[int], *, padded: bool) -> Work:
    """Of one micro-batch of samples of these lengths; of none, if it is a filler."""
    if padded and lengths:
        lengths = [max(lengths)] * len(lengths)
    return Work(tokens=sum(lengths), pairs=sum([n * n for n in lengths]))


@dataclass(frozen=True, kw_only=True)
class CostFit:
    """What micro-batches say of the cost.

    Attributes:
        prior: what was assumed before, in any unit.
        weight: of all observations together.
        moments: weighted sums of the products of the terms of the prior cost: aa, ab, ac, bb, bc, cc.
        products: weighted sums of the same terms times the seconds.
        squares: weighted sum of the seconds squared.
    """

    prior: Cost
    weight: float = 0.0
    moments: tuple[float, ...] = (0.0,) * 6
    products: tuple[float, ...] = (0.0,) * 3
    squares: float = 0.0

    def observed(self, step: Sequence[tuple[Work, float]]) -> CostFit:
        """With one more step.

        Args:
            step: its micro-batches, and the seconds that each took.
        """
        scale = self._scale()
        weight, squares = _DISCOUNT * self.weight, _DISCOUNT * self.squares
        moments = [_DISCOUNT * value for value in self.moments]
        products = [_DISCOUNT * value for value in self.products]
        for work, seconds in step:
            if scale and not seconds < _OUTLIER * scale * work.cost(self.prior):
                continue
            terms = self.prior.a * work.tokens, self.prior.b * work.pairs, self.prior.c
            for place, (i, j) in enumerate(_PAIRS):
                moments[place] += terms[i] * terms[j]
            for i in range(3):
                products[i] += terms[i] * seconds
            squares += seconds * seconds
            weight += 1.0
        return replace(self, weight=weight, moments=tuple(moments), products=tuple(products), squares=squares)

    def to_row(self) -> list[float]:
        """All that was observed, for `of_all`."""
        return [self.weight, *self.moments, *self.products, self.squares]

    @classmethod
    def of_all(cls, prior: Cost, rows: Sequence[Sequence[float]]) -> CostFit:
        """What several ranks observed, from the row of each."""
        weight, *sums, squares = (sum(column) for column in zip(*rows, strict=True))
        return cls(prior=prior, weight=weight, moments=tuple(sums[:6]), products=tuple(sums[6:]), squares=squares)

    def cost(self) -> Cost:
        """The fitted cost, in seconds.

        Raises:
            ValueError: nothing was observed yet.
        """
        token, pair, micro_batch = self._factors()
        least = _LEAST * self._scale()
        return Cost(a=max(least, token) * self.prior.a, b=pair * self.prior.b, c=max(least, micro_batch) * self.prior.c)

    @property
    def error(self) -> float:
        """Root mean square of what the fit leaves unexplained, as a share of that of the seconds."""
        factors, table = self._factors(), self._table()
        explained = 2 * sum([f * p for f, p in zip(factors, self.products, strict=True)]) - sum(
            [factors[i] * factors[j] * table[i][j] for i in range(3) for j in range(3)]
        )
        return float(max(0.0, 1.0 - explained / self.squares) ** 0.5)

    def _table(self) -> list[list[float]]:
        table = [[0.0] * 3 for _ in range(3)]
        for (i, j), value in zip(_PAIRS, self.moments, strict=True):
            table[i][j] = table[j][i] = value
        return table

    def _scale(self) -> float:
        """Seconds per unit of the prior cost, if its shape is right; 0 before anything was observed."""
        whole = sum(sum(row) for row in self._table())
        return sum(self.products) / whole if whole > 0 else 0.0

    def _factors(self) -> tuple[float, float, float]:
        """By what each term of the prior is to be multiplied, none below 0."""
        if not self.weight:
            raise ValueError("nothing was observed yet")
        scale, table = self._scale(), self._table()
        prior = [_PRIOR_WEIGHT * table[place][place] / self.weight for place in range(3)]
        free = [place for place in range(3) if table[place][place] > 0]
        while True:
            solved = _solved(
                [[table[i][j] + (prior[i] if i == j else 0.0) for j in free] for i in free],
                [self.products[i] + scale * prior[i] for i in free],
            )
            kept = [place for place, value in zip(free, solved, strict=True) if value >= 0]
            if kept == free:
                break
            free = kept
        factors = dict(zip(free, solved, strict=True))
        return factors.get(0, 0.0), factors.get(1, 0.0), factors.get(2, 0.0)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """The solution of a few linear equations by elimination; `matrix` is symmetric and positive definite.

    No library: two of them need not agree to the last bit.
    """
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for step, pivot in enumerate(rows):
        for row in rows[step + 1 :]:
            factor = row[step] / pivot[step]
            for column in range(step, len(row)):
                row[column] -= factor * pivot[column]
    solved: list[float] = []
    for step in reversed(range(len(rows))):
        rest = sum(rows[step][step + 1 + place] * value for place, value in enumerate(solved))
        solved.insert(0, (rows[step][-1] - rest) / rows[step][step])
    return solved
