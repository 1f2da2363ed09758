#!/usr/bin/env bash
# TRL 1.16.0: chat templates disagree on tool calls whose arguments are JSON text, the form of OpenAI's API.
#
# Expected: "arguments": "{\"command\": \"ls\"}" renders as the mapping {"command": "ls"} does, or fails everywhere.
# Observed: of the templates that TRL ships, some render both alike, some raise, some quote the text a second time, one puts
#           braces around it, and one accepts nothing but text.
# Why it matters: recorded conversations hold JSON text. With the wrong family, supervised training either stops or learns
#           to emit a quoted string for arguments. Parse the arguments before rendering, for all families but DeepSeek V3.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'jinja2==3.1.6'
venv/bin/pip install -q --no-deps 'trl==1.16.0' # only for its templates

cat >observe.py <<'END'
import json
import sysconfig
from pathlib import Path

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

templates = Path(sysconfig.get_path("purelib"), "trl", "chat_templates")
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False)
environment.globals["strftime_now"] = lambda form: "2026-01-01"


def raise_exception(message):
    raise TemplateError(message)


environment.globals["raise_exception"] = raise_exception


def render(path, arguments):
    call = {"type": "function", "function": {"name": "bash", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "List the files"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "bash", "content": "a.py"},
    ]
    return environment.from_string(path.read_text()).render(messages=messages, tools=[], bos_token="", eos_token="")


def compare(path):
    try:
        mapping = render(path, {"command": "ls"})
    except (TemplateError, TypeError):
        mapping = None
    try:
        text = render(path, '{"command": "ls"}')
    except (TemplateError, TypeError):
        return "not applicable" if mapping is None else "text raises an error"
    if mapping is None:
        return "a mapping raises an error"
    if "ls" not in mapping.split("List the files")[1]:
        return "not applicable"
    if mapping == text:
        return "alike"
    if r'"{\"command\": \"ls\"}"' in text:
        return "text is quoted again"
    return "text stays inside braces: " + text[text.index("{{") : text.index("}}") + 2]


groups = {}
for path in sorted(templates.glob("*.jinja")):
    if not path.stem.endswith("_training"):
        groups.setdefault(compare(path), []).append(path.stem)
for result, names in sorted(groups.items()):
    if result != "not applicable":
        print(f"{result}:", *names)
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "TRL's chat templates have changed" >&2; exit 1; }
a mapping raises an error: deepseekv3
alike: qwen3 qwen3_instruct_2507 qwen3_vl
text is quoted again: gptoss llama3_1 llama3_2 qwen2_5
text raises an error: diffusion_gemma gemma4_v5 glm4moe lfm2_v2 muse_glimmer nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8
text stays inside braces: {{"command": "ls"}}: gemma4 gemma4_v2 gemma4_v3 gemma4_v4
END
