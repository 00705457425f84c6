"""What a comparison says before it begins, and what its runs are called while they go on."""

from collections.abc import Iterator

from paceline.runs.config import Run
from paceline.runs.run import is_finished
from paceline.studies.compare.plan import Plan
from paceline.studies.live import Rows


def announce(plan: Plan) -> Iterator[str]:
    """What was chosen, and what it will take."""
    run, count = plan.cells[0].run, len(plan.cells)
    left = sum(not is_finished(cell.folder) for cell in plan.cells)
    assert run.steps is not None
    tokens = run.steps * run.batch_size * run.length
    lrs = sorted({cell.run.lr for cell in plan.cells})
    yield (
        f"{count} runs of {run.model} ({plan.trial.parameters:,} parameters): {run.steps:,} steps of "
        f"{run.batch_size * run.length:,} tokens each, lr {', '.join(f'{lr:g}' for lr in lrs)}"
    )
    passes = run.steps * run.batch_size / plan.trial.samples
    yield (
        f"{tokens:,} tokens a run, {passes:.2g} passes over the data; evaluated on "
        f"{(run.held_out_samples or 0) * run.length:,} held-out tokens"
    )
    at_once = f"{plan.jobs} at once" if plan.jobs > 1 else "one after the other"
    done = f"{count - left} are done already, the rest" if left < count else "all"
    yield f"{at_once}; {done} will take about {plan.seconds * left / count / 60:.1f} minutes"
    for name, why in plan.missing.items():
        yield f"{name} is left out: {why}"


def rows_of(plan: Plan) -> Rows:
    """Its runs, by method, learning rate and seed."""
    labels = [(_method(cell.run), f"{cell.run.lr:g}", str(cell.run.seed)) for cell in plan.cells]
    return Rows(plan.cells, ("method", "lr", "seed"), labels, plan.seconds)


def _method(run: Run) -> str:
    return run.optimizer if run.schedule == "constant" else f"{run.optimizer} {run.schedule}"
