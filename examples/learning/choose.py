"""Choose from rollouts of :mod:`.sample`: rows to fine-tune on, or a temperature.

python -m examples.learning.choose rows rollouts.jsonl -o rows.jsonl
python -m examples.learning.choose temperature 0.4=a.jsonl 0.8=b.jsonl -o temperature.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

from minisandbox.store.disk.durable import write_atomic


def main() -> None:
    """Choose rows or a temperature, and write them."""
    parser = argparse.ArgumentParser(description="choose from rollouts")
    verbs = parser.add_subparsers(required=True)
    rows = verbs.add_parser("rows", help="the rollouts that pass the hidden tests without a cheat")
    rows.add_argument("rollouts", type=Path)
    rows.set_defaults(choose=lambda args: rejection_rows(records(args.rollouts)))
    temperature = verbs.add_parser("temperature", help="the temperature with the highest pass@1")
    temperature.add_argument("rollouts", nargs="+", metavar="TEMPERATURE=FILE")
    temperature.set_defaults(choose=lambda args: [best_temperature(dict(map(_pair, args.rollouts)))])
    for verb in (rows, temperature):
        verb.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    chosen = list(args.choose(args))
    write_atomic(args.out, "".join(f"{json.dumps(record)}\n" for record in chosen).encode())
    print(f"{args.out}: {len(chosen)} records; the first without tokens: {_without_tokens(chosen)}")


def records(path: Path) -> list[dict[str, object]]:
    """Return the lines of a JSON Lines file; an empty list if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rejection_rows(rollouts: Iterable[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return rows for fine-tuning: honest passes without a cheat; equal rows once."""
    rows: dict[tuple[object, ...], dict[str, object]] = {}
    for rollout in rollouts:
        ids, mask = rollout.get("input_ids"), rollout.get("loss_mask")
        if rollout["honest"] == 1.0 and not rollout["cheated"] and isinstance(ids, list) and isinstance(mask, list):
            row = {"input_ids": ids, "loss_mask": mask, "traj_id": rollout["traj_id"]}
            rows.setdefault((rollout["task"], *ids), row)
    return list(rows.values())


def best_temperature(files: Mapping[float, Path]) -> dict[str, object]:
    """Return the temperature with the highest pass@1, and the pass@1 of all."""
    rates = {
        temperature: fmean(float(str(rollout["honest"])) for rollout in records(path) if rollout["honest"] is not None)
        for temperature, path in files.items()
    }
    best = max(rates, key=lambda temperature: rates[temperature])
    return {"temperature": best, "pass@1": {str(temperature): rate for temperature, rate in rates.items()}}


def _pair(text: str) -> tuple[float, Path]:
    temperature, _, path = text.partition("=")
    return float(temperature), Path(path)


def _without_tokens(chosen: list[dict[str, object]]) -> dict[str, object]:
    return {key: value for record in chosen[:1] for key, value in record.items() if not isinstance(value, list)}


if __name__ == "__main__":
    main()
