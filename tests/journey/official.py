"""Have swebench write its report on an evaluation of ours, by its own `make_run_report`.

python -m tests.journey.official ROWS PREDICTIONS EVALUATION

Prints swebench's summary; the report lies next to EVALUATION's own, as official.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from pathlib import Path

RUN = "journey"


def main() -> None:
    """Write the report from the logs of each instance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("evaluation", type=Path)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    predictions = json.loads(options.predictions.read_text())
    (model,) = {str(one["model_name_or_path"]).replace("/", "__") for one in predictions.values()}
    evaluation = options.evaluation.resolve()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # it reads and writes there
        logs = Path("logs/run_evaluation") / RUN
        logs.mkdir(parents=True)
        (logs / model).symlink_to(evaluation / "logs")
        report = importlib.import_module("swebench.harness.reporting").make_run_report(predictions, rows, RUN)
        (evaluation / "official.json").write_bytes(report.read_bytes())


if __name__ == "__main__":
    main()
