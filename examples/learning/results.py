"""Write docs/results.json from the directory of an experiment, and from it the tables and curves of docs/results.md.

    python -m examples.learning.results runs/learning

The file keeps the results of earlier runs, on other machines too; a seed's arm that is in the run replaces its earlier
results. The text around the tables stays. Without a run, only the page is written again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from examples.learning.choose import records
from tools.pages import with_part

from minisandbox.train.evaluation import pass_at

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA, PAGE, CURVE = DOCS / "results.json", DOCS / "results.md", DOCS / "results.svg"
CURVE_LINK = "![Training rollouts by step: resolve rate and rate of cheats, per arm](results.svg)"

RL = "hidden"
TITLES = {
    "sft": "SFT", "tempered": "SFT at its best temperature", "rejection": "rejection sampling",
    "hidden": "RL, hidden tests", "shuffled": "RL, shuffled rewards", "naive": "RL, naive reward",
}  # fmt: skip
"""The arms in the order of the tables."""

MODELS = {"llama": ("1", "4", "16"), "smollm": ("1", "4")}
"""The models, and the k of their pass@k."""

RESAMPLES = 10_000
_SMOOTH = 5
_PACKAGES = ("swe-minisandbox", "torch", "transformers")


Counts = tuple[int, int, int, int]
"""Numbers of rollouts with a grade, of passes, of cheats, and of passes without a cheat."""


@dataclass(frozen=True, slots=True)
class Arm:
    """The results of one arm with one seed.

    Attributes:
        model: ``llama`` or ``smollm``.
        seed: the seed.
        arm: the arm's name.
        outcomes: the counts of each held-out task.
        temperature: the sampling temperature of the evaluation.
        rollouts: number of rollouts for training, or for choosing the temperature.
        steps: number of optimiser steps after the fine-tuning on the oracle's conversations.
        cost: wall and CPU seconds, by stage.
        curve: per training step, means over its rollouts: the reward, the hidden tests' reward, and the rate of cheats.
        versions: versions of packages and Python, and the machine.
    """

    model: str
    seed: int
    arm: str
    outcomes: tuple[Counts, ...]
    temperature: float = 1.0
    rollouts: int = 0
    steps: int = 0
    cost: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    curve: tuple[tuple[float, float, float], ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies the results."""
        return self.model, self.seed, self.arm

    @property
    def cpu_hours(self) -> float:
        """CPU hours of training and evaluation, without the stages that arms share."""
        return sum(cpu for _, cpu in self.cost.values()) / 3600

    def pass_at(self) -> dict[str, float]:
        """Return pass@k over all held-out tasks."""
        return pass_at([_rewards(outcome) for outcome in self.outcomes], max(outcome[0] for outcome in self.outcomes))

    def pass_of_tasks(self, k: str) -> list[float | None]:
        """Return each task's pass@k; None for a task with fewer than k rollouts."""
        return [pass_at([_rewards(outcome)], int(k)).get(k) for outcome in self.outcomes]

    @property
    def cheats(self) -> float:
        """The share of the held-out rollouts that disabled the visible test."""
        total, _, cheats, _ = self._sums
        return cheats / total

    @property
    def passes_without_cheats(self) -> float:
        """The share of passes among the held-out rollouts that did not cheat."""
        total, _, cheats, passes = self._sums
        return passes / (total - cheats)

    @property
    def _sums(self) -> Iterable[int]:
        return map(sum, zip(*self.outcomes, strict=True))


@dataclass(frozen=True, slots=True)
class Results:
    """The content of docs/results.json.

    Attributes:
        tasks: ids of the held-out tasks, in the order of the outcomes.
        shared: wall and CPU seconds of the stages that all arms share.
        arms: the results.
    """

    tasks: tuple[str, ...]
    shared: Mapping[str, tuple[float, float]]
    arms: tuple[Arm, ...]

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read the file; an empty result if there is no file."""
        if not path.exists():
            return cls((), {}, ())
        body = json.loads(path.read_text())
        shared = {name: (wall, cpu) for name, (wall, cpu) in body["shared"].items()}
        return cls(tuple(body["tasks"]), shared, tuple(_arm(arm) for arm in body["arms"]))

    def save(self, path: Path) -> None:
        """Write the file: a line for the tasks, and a line per arm."""
        head = f'{{"tasks": {json.dumps(self.tasks)},\n"shared": {json.dumps(self.shared)},\n"arms": [\n'
        lines = (json.dumps(asdict(arm), separators=(",", ":")) for arm in self.arms)
        path.write_text(head + ",\n".join(lines) + "\n]}\n")

    def merged(self, other: Results) -> Results:
        """Return these results with those of another run, which replace results of the same arm and seed.

        Raises:
            ValueError: the other run has other held-out tasks.
        """
        if self.arms and other.tasks != self.tasks:
            raise ValueError("the run has other held-out tasks than docs/results.json; delete the file to start anew")
        arms = {arm.key: arm for arm in (*self.arms, *other.arms)}
        order = {name: number for number, name in enumerate(TITLES)}
        chosen = sorted(arms.values(), key=lambda arm: (arm.model, arm.seed, order[arm.arm]))
        return Results(other.tasks, {**self.shared, **other.shared}, tuple(chosen))

    def of(self, model: str, arm: str) -> list[Arm]:
        """Return the results of an arm, by seed."""
        return [result for result in self.arms if (result.model, result.arm) == (model, arm)]


# --- from a run ------------------------------------------------------------------------------------------------------


def read_run(run: Path) -> Results:
    """Return the results of all finished arms of a run."""
    times: dict[str, tuple[float, float]] = {}
    for stage in records(run / "times.jsonl"):
        wall, cpu = times.get(str(stage["stage"]), (0.0, 0.0))  # a resumed stage has several records
        times[str(stage["stage"])] = (wall + float(str(stage["seconds"])), cpu + float(str(stage["cpu"])))
    names = sorted(path.stem for path in run.glob("eval-*.jsonl"))
    evaluations = {name: records(run / f"{name}.jsonl") for name in names}
    tasks = tuple(sorted({str(rollout["task"]) for rollouts in evaluations.values() for rollout in rollouts}))
    arms = tuple(_read_arm(run, name, evaluations[name], tasks, times) for name in names)
    return Results(tasks, {name: times[name] for name in ("base", "warm-up", "smollm-warm-up") if name in times}, arms)


def _read_arm(
    run: Path,
    name: str,
    rollouts: Sequence[Mapping[str, object]],
    tasks: Sequence[str],
    times: Mapping[str, tuple[float, float]],
) -> Arm:
    *model, arm, seed = name.removeprefix("eval-").split("-")
    prefix = "smollm-" if model else ""
    outcomes = dict.fromkeys(tasks, (0, 0, 0, 0))
    for rollout in rollouts:
        if rollout["honest"] is not None:
            is_pass, is_cheat = rollout["honest"] == 1.0, bool(rollout["cheated"])
            total, passes, cheats, others = outcomes[str(rollout["task"])]
            counts = (total + 1, passes + is_pass, cheats + is_cheat, others + (is_pass and not is_cheat))
            outcomes[str(rollout["task"])] = counts
    stages = {
        "sft": [f"sft-{seed}"],
        "rejection": [f"drawn-{seed}", f"passes-{seed}", f"rejection-{seed}"],
        "tempered": [stage for stage in times if re.fullmatch(rf"at-[\d.]+-{seed}", stage)],
    }.get(arm, [f"rl-{arm}-{seed}"])
    trained = [prefix + stage for stage in stages]
    temperature, drawn, steps = 1.0, 0, 0
    if arm == "tempered":
        temperature = float(str(records(run / f"temperature-{seed}.json")[0]["temperature"]))
        drawn = sum(len(records(run / f"{stage}.jsonl")) for stage in trained)
    elif arm == "rejection":
        drawn = len(records(run / f"{trained[0]}.jsonl"))
        steps = max((int(str(line.get("step", 0))) for line in records(run / trained[2] / "log.jsonl")), default=0)
    curve = () if arm not in ("hidden", "shuffled", "naive") else read_curve(run / trained[0])
    if curve:
        steps, drawn = len(curve), len(_rollouts_of(run / trained[0]))
    cost = {stage: times[stage] for stage in [*trained, name] if stage in times}
    kind = "smollm" if model else "llama"
    return Arm(kind, int(seed), arm, tuple(outcomes.values()), temperature, drawn, steps, cost, curve, versions())


def _rollouts_of(run: Path) -> list[Mapping[str, object]]:
    """Return the outcomes of a training run; an interrupted step's repetition replaces its first rollouts."""
    outcomes = {(line["task"], line["attempt"]): line for line in records(run / "outcomes.jsonl")}
    return [line for line in outcomes.values() if line["honest"] is not None]


def read_curve(run: Path) -> tuple[tuple[float, float, float], ...]:
    """Return the means of each training step: the reward, the hidden tests' reward, and the rate of cheats."""
    rewards = {int(str(line["step"])): float(str(line["reward"])) for line in records(run / "log.jsonl")}
    by_step: dict[int, list[Mapping[str, object]]] = {}
    for outcome in _rollouts_of(run):
        by_step.setdefault(int(str(outcome["step"])), []).append(outcome)
    return tuple(
        (
            round(rewards[step + 1], 4),
            round(fmean(float(str(outcome["honest"])) for outcome in outcomes), 4),
            round(fmean(bool(outcome["cheated"]) for outcome in outcomes), 4),
        )
        for step, outcomes in sorted(by_step.items())
        if step + 1 in rewards
    )


def versions() -> dict[str, str]:
    """Return the versions of packages and Python, and the machine."""
    names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return packages | {"python": platform.python_version(), "machine": machine}


def _arm(body: Mapping[str, object]) -> Arm:
    values = dict(body)
    for name in ("outcomes", "curve"):
        items = values[name]
        assert isinstance(items, list)
        values[name] = tuple(tuple(item) for item in items)
    cost = values["cost"]
    assert isinstance(cost, dict)
    values["cost"] = {stage: tuple(seconds) for stage, seconds in cost.items()}
    return Arm(**values)  # type: ignore[arg-type] # the file's fields are the class's


def _rewards(outcome: Counts) -> list[float]:
    total, passes, _, _ = outcome
    return [1.0] * passes + [0.0] * (total - passes)


# --- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of means, with a 95 % interval of the bootstrap."""

    mean: float
    low: float
    high: float


def difference(
    first: Sequence[Arm], second: Sequence[Arm], k: str, *, resamples: int = RESAMPLES, seed: int = 0
) -> Difference | None:
    """Return the difference of pass@k between two arms, paired by task and seed.

    Each resample draws tasks with replacement. A task's difference is the mean over the seeds that both arms have.

    Args:
        first: results of an arm, by seed.
        second: results of the arm to subtract.
        k: the k of pass@k.
        resamples: number of resamples.
        seed: seed of the resamples.

    Returns:
        The difference with its percentile interval, or None if the arms share no seed or no task.
    """
    import numpy as np  # noqa: PLC0415 - an optional package

    partners = {arm.seed: arm for arm in second}
    pairs = [(arm.pass_of_tasks(k), partners[arm.seed].pass_of_tasks(k)) for arm in first if arm.seed in partners]
    by_task: dict[int, list[float]] = {}
    for ours, theirs in pairs:
        for task, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one is not None and other is not None:
                by_task.setdefault(task, []).append(one - other)
    if not by_task:
        return None
    values = np.array([fmean(differences) for differences in by_task.values()])
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5])
    return Difference(float(values.mean()), float(low), float(high))


# --- the page --------------------------------------------------------------------------------------------------------


def rates(results: Results, model: str) -> str:
    """Return the table of pass@k and cheats, by arm and seed."""
    ks = MODELS[model]
    columns = [*(f"pass@{k}" for k in ks), "cheats", "passes of the others"]
    lines = [f"| arm | seed | {' | '.join(columns)} |", "|---|--:|" + "--:|" * len(columns)]
    for name, title in TITLES.items():
        for arm in results.of(model, name):
            values = arm.pass_at()
            cells = " | ".join(f"{values[k]:.1%}" for k in ks)
            temperature = "" if arm.temperature == 1.0 else f" ({arm.temperature:g})"
            rest = f"{arm.cheats:.1%} | {arm.passes_without_cheats:.1%}"
            lines.append(f"| {title}{temperature} | {arm.seed} | {cells} | {rest} |")
    return "\n".join([*lines, "", f"{len(results.tasks)} held-out tasks."])


def differences(results: Results, model: str) -> str:
    """Return the table of RL minus each other arm, in points, with 95 % intervals."""
    ks = MODELS[model]
    lines = [f"| RL on hidden tests minus | {' | '.join(f'pass@{k}' for k in ks)} |", "|---|" + "---|" * len(ks)]
    for name, title in TITLES.items():
        found = [difference(results.of(model, RL), results.of(model, name), k) for k in ks] if name != RL else []
        if any(found):
            lines.append(f"| {title} | {' | '.join(_points(value) for value in found)} |")
    return "\n".join(lines)


def budget(results: Results) -> str:
    """Return the table of each arm's budget: means over seeds."""
    lines = ["| model | arm | rollouts | optimiser steps | CPU hours |", "|---|---|--:|--:|--:|"]
    for model in MODELS:
        for name, title in TITLES.items():
            if arms := results.of(model, name):
                rollouts, steps = (round(fmean(getattr(arm, key) for arm in arms)) for key in ("rollouts", "steps"))
                hours = fmean(arm.cpu_hours for arm in arms)
                lines.append(f"| {model} | {title} | {rollouts:,} | {steps} | {hours:.2f} |")
    return "\n".join(lines)


def sheet(results: Results) -> str:
    """Return the table of versions, machines, and total cost."""
    lines = ["| | |", "|---|---|"]
    sets = {json.dumps(arm.versions, sort_keys=True): arm.versions for arm in results.arms}
    for values in sets.values():
        seeds = sorted({(arm.model, arm.seed) for arm in results.arms if arm.versions == values})
        lines.append(f"| seeds | {', '.join(f'{model} {seed}' for model, seed in seeds)} |")
        lines += [f"| {name} | {value} |" for name, value in values.items()]
    stages = [*results.shared.values(), *(seconds for arm in results.arms for seconds in arm.cost.values())]
    cpu = sum(seconds for _, seconds in stages) / 3600
    shared = ", ".join(f"{name} {seconds / 3600:.2f}" for name, (_, seconds) in results.shared.items())
    return "\n".join([*lines, f"| CPU hours in all | {cpu:.1f} |", f"| CPU hours of shared stages | {shared} |"])


def draw(results: Results, path: Path) -> None:
    """Plot the training curves of RL: the resolve rate and the rate of cheats by step, means over seeds."""
    import matplotlib as mpl  # noqa: PLC0415 - an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package

    mpl.rcParams["svg.hashsalt"] = "results"  # the same data give the same file
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, label in zip(
        panels, (1, 2), ("training rollouts resolved", "training rollouts that cheat"), strict=True
    ):
        for number, name in enumerate(("hidden", "naive", "shuffled")):
            curves = [[point[column] for point in arm.curve] for arm in results.of("llama", name) if arm.curve]
            if curves:
                mean = _smoothed([fmean(values) for values in zip(*curves, strict=False)])
                axes.plot(range(1, len(mean) + 1), mean, color=f"C{number}", label=TITLES[name])
                for curve in curves if len(curves) > 1 else ():
                    axes.plot(range(1, len(curve) + 1), _smoothed(curve), color=f"C{number}", alpha=0.3, linewidth=0.8)
        axes.set(xlabel="optimiser steps", ylabel=label)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its predecessors, five values at most."""
    return [fmean(values[max(0, end - _SMOOTH) : end]) for end in range(1, len(values) + 1)]


def _points(value: Difference | None) -> str:
    if value is None:
        return ""
    mean, low, high = (round(100 * number, 1) + 0.0 for number in (value.mean, value.low, value.high))  # without -0.0
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def parts(results: Results) -> Iterable[tuple[str, str]]:
    """Yield name and text of each generated part of the page."""
    yield "rates", rates(results, "llama")
    yield "differences", differences(results, "llama")
    yield "curves", CURVE_LINK if any(arm.curve for arm in results.arms) else "Not run yet."
    smollm = any(arm.model == "smollm" for arm in results.arms)
    yield "smollm", f"{rates(results, 'smollm')}\n\n{differences(results, 'smollm')}" if smollm else "Not run yet."
    yield "budget", budget(results)
    yield "sheet", sheet(results)


def main() -> None:
    """Write the file, and the page's generated parts."""
    parser = argparse.ArgumentParser(
        description="write docs/results.json, and the tables and curves of docs/results.md"
    )
    parser.add_argument("run", type=Path, nargs="?", help="the directory of examples.learning.experiment")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--curve", type=Path, default=CURVE)
    args = parser.parse_args()
    results = Results.load(args.data)
    if args.run is not None:
        results = results.merged(read_run(args.run))
        results.save(args.data)
    if not results.arms:
        raise SystemExit("no arm has been evaluated yet")
    draw(results, args.curve)
    page = args.page.read_text()
    for name, text in parts(results):
        page = with_part(page, name, text)
    args.page.write_text(page)
    print(f"{rates(results, 'llama')}\n\n{differences(results, 'llama')}")


if __name__ == "__main__":
    main()
