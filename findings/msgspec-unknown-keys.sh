#!/usr/bin/env bash
# msgspec 0.22.0: a misspelt option disappears if the class is a dataclass.
#
# Expected: msgspec.convert reports unknown keys of a dataclass on request, as it does for a Struct with
#           forbid_unknown_fields=True, and as pydantic does for both with extra="forbid".
# Observed: a dataclass drops them silently, and convert has no option for it, strict=True included. A dataclass field of the
#           type bytes takes any text as base64, in convert, too, where nothing has been JSON.
# Why it matters: a configuration with "learning_rat: 1e-6" trains with the default learning rate. Use Structs for whatever
#           people write by hand.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'msgspec==0.22.0' 'pydantic==2.14.4'

cat >observe.py <<'END'
from dataclasses import dataclass

import msgspec
from pydantic import ConfigDict, TypeAdapter, with_config


@dataclass
class Plain:
    learning_rate: float = 1e-5


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Checked:
    learning_rate: float = 1e-5


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    learning_rate: float = 1e-5


@dataclass
class Blob:
    content: bytes


written = {"learning_rat": 1e-6}
trials = {
    "msgspec, Struct": lambda: msgspec.convert(written, Strict),
    "msgspec, dataclass": lambda: msgspec.convert(written, Plain),
    "msgspec, dataclass, strict": lambda: msgspec.convert(written, Plain, strict=True),
    "pydantic, dataclass": lambda: TypeAdapter(Checked).validate_python(written),
    "msgspec, bytes from 'make'": lambda: msgspec.convert({"content": "make"}, Blob),
}
for name, trial in trials.items():
    try:
        print(f"{name}: {trial()}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "the treatment of unknown keys has changed" >&2; exit 1; }
msgspec, Struct: ValidationError
msgspec, dataclass: Plain(learning_rate=1e-05)
msgspec, dataclass, strict: Plain(learning_rate=1e-05)
pydantic, dataclass: ValidationError
msgspec, bytes from 'make': Blob(content=b'\x99\xa9\x1e')
END
