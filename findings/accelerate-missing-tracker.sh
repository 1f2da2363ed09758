#!/usr/bin/env bash
# accelerate 1.15.0: of several trackers, one whose package is not installed is dropped without a warning.
#
# Expected: log_with=["tensorboard", "wandb"] without wandb warns or raises an error, as log_with="wandb" and an unknown
#           name do.
# Observed: the accelerator has one tracker, and no output says that another was asked for.
# Why it matters: a long training leaves no curves where its owner looks for them. After init_trackers, compare
#           accelerator.trackers with what was asked.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'accelerate==1.15.0' 'tensorboard==2.21.0' 'torch==2.13.0'

cat >observe.py <<'END'
import importlib.util
import warnings

from accelerate import Accelerator

assert importlib.util.find_spec("wandb") is None
for names in ("wandb", ["tensorboard", "wandb"], ["tensorboard", "wandbb"]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            accelerator = Accelerator(cpu=True, log_with=names, project_dir="logs")
        except ValueError:
            print(f"{names}: an error")
            continue
        accelerator.init_trackers("experiment")
        accelerator.log({"loss": 1.0}, step=1)
        accelerator.end_training()
    about = [warning for warning in caught if "tracker" in str(warning.message)]
    print(f"{names}: {[tracker.name for tracker in accelerator.trackers]}, {len(about)} warnings")
END
venv/bin/python observe.py >observed 2>errors || { cat errors >&2; exit 1; }
cat observed errors
diff - observed <<'END' || { echo "accelerate handles missing trackers in another way" >&2; exit 1; }
wandb: [], 1 warnings
['tensorboard', 'wandb']: ['tensorboard'], 0 warnings
['tensorboard', 'wandbb']: an error
END
