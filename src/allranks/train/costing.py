"""What micro-batches cost here, fitted while the run goes on, so that the split makes the ranks equally busy."""

from __future__ import annotations

from allranks.batches.fit import CostFit
from allranks.train.context import Context
from allranks.train.job import Job
from allranks.train.step import Part

_WARM_UP_STEPS = 2
"""The first steps of a process also load kernels and fill the allocator's cache."""

FIRST_FIT_STEPS = 20
"""Steps of a process after which the ranks agree on a cost, and again after twice as many, and so on: so seldom that
one can follow which step was split by what.
"""


def fit_cost(ctx: Context, job: Job, part: Part) -> None:
    """Take note of what the committed step took; now and then, agree on a cost with all ranks.

    Raises:
        ControlPlaneLost: a rank is gone.
    """
    if not ctx.plan.config.training.fit_cost:
        return
    job.steps_here += 1
    if job.steps_here <= _WARM_UP_STEPS:
        return
    job.fit = job.fit.observed(list(zip(part.works, ctx.stopwatch.laps(), strict=True)))
    times, rest = divmod(job.steps_here, FIRST_FIT_STEPS)
    if rest or times & (times - 1):
        return
    fit = CostFit.of_all(job.fit.prior, ctx.control.exchange(job.fit.to_row()))
    if not fit.weight:
        return
    job.cost = fit.cost()
    ctx.events.write(
        "cost",
        step=job.position.step,
        a=job.cost.a,
        b=job.cost.b,
        c=job.cost.c,
        error=fit.error,
    )
    if ctx.is_main:
        a, b, c = 1e6 * job.cost.a, 1e9 * job.cost.b, 1e3 * job.cost.c
        ctx.console.say(
            f"from here on the split counts {c:.3g} ms for a micro-batch, {a:.3g} µs for a token and {b:.3g} ns for a "
            f"pair of tokens (fitted; {fit.error:.0%} unexplained)"
        )
