"""``minisandbox trajectories export``: write examples in trainers' formats, and show loss masks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.agents.actions import TOOLS
from minisandbox.cli.common import exits
from minisandbox.cli.common.output import Progress, add_json_option, put, say
from minisandbox.cli.trajectories.data import add_sources, examples_of, finish, refuse_to_overwrite, with_status
from minisandbox.errors import InvalidValue, NotFound
from minisandbox.rollouts import export_harbor, export_inspect, export_sweagent
from minisandbox.rollouts.examples import ALL_STYLES, rewritten_prompt
from minisandbox.trajectories.example import Example
from minisandbox.trajectories.reports import StageReport
from minisandbox.trajectories.styles import CannotSay, Converter
from minisandbox.trajectories.tokenised import (
    TokenisedRow,
    captured_rows,
    open_tokenizer,
    shown_mask,
    templated_row,
)
from minisandbox.trajectories.writing import Kind, Row, chat_row, write_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMATS = {
    "sweagent": "SWE-agent's files, a directory per rollout of a run",
    "atif": "a Harbor job of ATIF trajectories, a directory per rollout of a run",
    "inspect": "a log of Inspect (.eval or .json), a sample per rollout of a run",
    "chat": "conversations, unchanged",
    "xml": "conversations, actions as <function=...>",
    "tool": "conversations, actions as tool calls",
    "ticks": "conversations, actions in ``` as SWE-agent's command lines",
    "text": "conversations, actions as the bash agent's blocks",
    "datasets": "like chat, in a folder of the datasets package",
    "parquet": "like chat, in a Parquet file",
    "tokens": "tokens, labels, and a loss mask",
}

_OF_RUNS: Mapping[str, Callable[[Path, Path, bool], Iterator[str]]] = {
    "sweagent": lambda run, out, _: export_sweagent(run, out),
    "atif": lambda run, out, tokens: export_harbor(run, out, tokens=tokens),
    "inspect": lambda run, out, _: export_inspect(run, out),
}
"""The formats of whole runs: functions of the run, the output, and whether it has tokens."""


def configure(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the parser."""
    export = verbs.add_parser(
        "export",
        help="write rollouts in the formats of SWE-agent, SWE-smith and trainers",
        description="Write rollouts in another program's format. The output's suffix chooses the storage: .jsonl, "
        ".parquet, else a folder of the datasets package. A report next to it lists dropped rollouts, with reasons.",
        epilog="; ".join(f"{name}: {what}" for name, what in _FORMATS.items()) + ".",
    )
    add_sources(export)
    export.add_argument("--to", choices=tuple(_FORMATS), default="sweagent", help="the format (default: sweagent)")
    export.add_argument("-o", "--out", metavar="OUT", type=Path, help="the file or folder to write")
    export.add_argument("--system", metavar="FILE", type=Path, help="a text that replaces every system prompt")
    group = export.add_argument_group("tokens")
    group.add_argument(
        "--tokenizer", metavar="DIR",
        help="tokenise examples without tokens (`collect --no-tokens` omits the engine's); the chat template marks the "
        "model's",
    )  # fmt: skip
    group.add_argument("--chat-template", metavar="FILE", type=Path, help="the template to use instead of its own")
    group.add_argument("--no-tokens", action="store_true", help="omit the tokens from atif, where steps repeat prompts")
    group.add_argument("--show-mask", metavar="ID", help="print the tokens of a rollout that carry loss; write nothing")
    add_json_option(export)
    export.set_defaults(run=run_export, kept="written files stay; the same command rewrites all of them")


def run_export(args: argparse.Namespace) -> int:
    """Export rollouts, or show a loss mask."""
    if args.show_mask is not None:
        return _show_mask(args)
    if args.out is None:
        raise InvalidValue("export needs --out", hint="name the output: --out FILE")
    refuse_to_overwrite(args.out, args.sources)
    if args.to in _OF_RUNS:
        return _export_run(args)
    export = _Export(args.to, StageReport("export", _rules(args)), _converter(args), _tokenizer(args))
    _check_name(args)
    kind: Kind = "chat" if args.to in ("chat", "tool", "parquet", "datasets") else "plain"
    with Progress() as progress:
        rows = export.rows(with_status(examples_of(args), progress))
        count = write_rows(args.out, rows, "tokens" if args.to == "tokens" else kind)
    if export.converter is not None:
        export.report.notes.update(export.converter.notes)
    export.report.notes["rows written"] = count
    return finish(args, export.report, args.out)


def _export_run(args: argparse.Namespace) -> int:
    if len(args.sources) != 1:
        raise InvalidValue(f"--to {args.to} takes one run", hint="export each run to a directory of its own")
    run, count = args.sources[0], 0
    names = _OF_RUNS[args.to](run, args.out, not args.no_tokens)
    with Progress() as progress:
        for count, name in enumerate(names, start=1):
            progress.status(f"{count} {name}")
    say(f"{args.out}: {count} rollouts")
    return exits.OK


def _rules(args: argparse.Namespace) -> dict[str, object]:
    options = {"to": args.to, "tokenizer": args.tokenizer, "system": args.system, "chat_template": args.chat_template}
    return {name: str(value) for name, value in options.items() if value is not None}


def _check_name(args: argparse.Namespace) -> None:
    """Check that the output's suffix fits ``--to parquet`` or ``--to datasets``.

    Raises:
        InvalidValue: the suffix does not fit.
    """
    suffix = args.out.suffix
    if (args.to == "parquet" and suffix != ".parquet") or (
        args.to == "datasets" and suffix in (".jsonl", ".json", ".parquet")
    ):
        raise InvalidValue(
            f"--to {args.to} cannot write {args.out}",
            hint="use the suffix .parquet for a Parquet file, none for a folder",
        )


def _converter(args: argparse.Namespace) -> Converter | None:
    system = None if args.system is None else args.system.read_text(encoding="utf-8").rstrip("\n")
    if args.to in ALL_STYLES:
        return Converter(args.to, styles=ALL_STYLES, system=system, rewrite=rewritten_prompt, tools=TOOLS)
    if system is not None:
        raise InvalidValue(f"--system and --to {args.to} cannot be combined", hint="use --to xml, tool, ticks or text")
    return None


def _tokenizer(args: argparse.Namespace) -> PreTrainedTokenizerBase | None:
    template = None if args.chat_template is None else args.chat_template.read_text(encoding="utf-8")
    if args.tokenizer is None:
        if template is not None:
            raise InvalidValue("--chat-template needs --tokenizer", hint="name the tokenizer too")
        return None
    return open_tokenizer(args.tokenizer, chat_template=template)


@dataclass(slots=True)
class _Export:
    """State of one export."""

    form: str
    report: StageReport
    converter: Converter | None
    tokenizer: PreTrainedTokenizerBase | None

    def rows(self, examples: Iterator[Example]) -> Iterator[Row]:
        """Convert examples to rows; report dropped examples."""
        for example in examples:
            if self.form == "tokens":
                yield from self._tokens(example)
                continue
            try:
                converted = example if self.converter is None else self.converter.convert(example)
            except CannotSay as error:
                self.report.drop(example, "cannot_convert", error.what)
                continue
            if not converted.turns:
                self.report.drop(example, "no_answers", "no model was used")
                continue
            self.report.keep(example)
            yield chat_row(converted)

    def _tokens(self, example: Example) -> Iterator[Row]:
        rows = tokens_of(example, self.tokenizer)
        if not rows:
            self.report.drop(example, "no_tokens", "its engine reported no tokens; name a tokenizer: --tokenizer DIR")
            return
        self.report.keep(example)
        if self.tokenizer is not None and rows[0].logprobs is not None:
            self.report.notes["examples with their engine's tokens, not the tokenizer's"] += 1
        self.report.notes["tokens"] += sum(len(row.ids) for row in rows)
        self.report.notes["tokens with loss"] += sum(row.mask.count(1) for row in rows)
        yield from (row.to_row() for row in rows)


def tokens_of(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> list[TokenisedRow]:
    """Return an example's rows from the engine's tokens, or from the tokenizer if the example has no tokens.

    Args:
        example: the example.
        tokenizer: tokenizer for examples without tokens, or None.

    Raises:
        TrajectoryError: the chat template does not allow a mask.
    """
    rows = list(captured_rows(example))
    if rows or tokenizer is None or not example.turns:
        return rows
    return [templated_row(example, tokenizer)]


def _show_mask(args: argparse.Namespace) -> int:
    tokenizer, row_count = _tokenizer(args), 0
    for example in examples_of(args):
        if args.show_mask not in (example.traj_id, example.instance_id, f"{example.instance_id}#{example.attempt}"):
            continue
        for row in tokens_of(example, tokenizer):
            row_count += 1
            loss_count = row.mask.count(1)
            put(f"{example.traj_id} row {row.number}: {len(row.ids)} tokens, {loss_count} with loss")
            put("\n".join(shown_mask(row, tokenizer)))
    if not row_count:
        raise NotFound(
            f"no rollout {args.show_mask!r} has tokens",
            hint="give a traj_id, or a task's id with #N for its N-th rollout; --tokenizer DIR tokenises text",
        )
    return exits.OK
