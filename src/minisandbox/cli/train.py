"""``minisandbox train sft|rl|options``: fine-tune models, and train them by reinforcement learning."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import Progress, add_json_option, print_json, put
from minisandbox.cli.common.run_options import add_cluster_argument, print_nodes
from minisandbox.cli.common.task_sets import add_local_sources_option
from minisandbox.errors import InvalidValue
from minisandbox.rollouts import ImageOf
from minisandbox.rollouts.cluster import Cluster
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet
from minisandbox.train.config import RlConfig, SftConfig
from minisandbox.train.options import describe, load, packaged, to_yaml

KINDS = {"sft": SftConfig, "rl": RlConfig}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs to the parser."""
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    sft = verbs.add_parser("sft", help="fine-tune a model on rows of tokens")
    _add_common(sft)
    sft.add_argument(
        "--show-mask", type=int, metavar="N", help="print the first N rows and the tokens that carry loss, then exit"
    )
    sft.set_defaults(run=run_sft)
    rl = verbs.add_parser("rl", help="train a model by reinforcement learning on tasks, in sandboxes")
    _add_common(rl)
    rl.add_argument("--repo-mirrors", metavar="DIR", type=Path, help="git repositories tried before the network")
    add_local_sources_option(rl)
    add_cluster_argument(rl)
    rl.set_defaults(run=run_rl)
    options = verbs.add_parser("options", help="print every option of a configuration")
    options.add_argument("kind", choices=(*KINDS, "skyrl"), help="the configuration; skyrl: our section of SkyRL's")
    add_json_option(options)
    options.set_defaults(run=run_options)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help=f"a YAML file, or a packaged one: {', '.join(packaged())}")
    parser.add_argument(
        "--set", dest="settings", metavar="KEY=VALUE", action="append", default=[],
        help="override a key of the file: optimizer.learning_rate=2e-5; may be repeated",
    )  # fmt: skip
    parser.add_argument("-o", "--out", metavar="DIR", help="the run's directory: short for --set out=DIR")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration, then exit")
    add_json_option(parser)
    parser.set_defaults(kept="checkpoints are kept; the same command resumes from the last one")


def _settings(args: argparse.Namespace) -> list[str]:
    return [*args.settings, *([f"out={args.out}"] if args.out else [])]


def run_sft(args: argparse.Namespace) -> int:
    """Fine-tune a model."""
    config = load(SftConfig, args.config, _settings(args))
    if args.print_config:
        put(to_yaml(config), end="")
        return exits.OK
    if args.show_mask is not None:
        _show_masks(config, args.show_mask)
        return exits.OK
    from minisandbox.train.running import is_first, leave_process_group  # noqa: PLC0415 - slow to import
    from minisandbox.train.sft import train_sft  # noqa: PLC0415 - slow to import

    with Progress() as progress:
        result = train_sft(config, tell=progress.note)
    leave_process_group()
    if not is_first():  # only rank 0 reports the result
        return exits.OK
    if args.json:
        print_json(result)
        return exits.OK
    held_out_loss = "" if result.held_out_loss is None else f"; held-out loss {result.held_out_loss:.4f}"
    losses = "" if result.last_loss is None else f", loss {result.first_loss:.4f} to {result.last_loss:.4f}"
    put(f"{result.steps} steps on {result.rows} rows{losses}{held_out_loss}; the model is in {result.model}")
    return exits.OK


def run_rl(args: argparse.Namespace) -> int:
    """Train a model by reinforcement learning."""
    config = load(RlConfig, args.config, _settings(args))
    if args.print_config:
        put(to_yaml(config), end="")
        return exits.OK
    from minisandbox.train.evaluation import draw_curve  # noqa: PLC0415 - slow to import
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - slow to import
    from minisandbox.train.running import (  # noqa: PLC0415 - slow to import
        is_first,
        leave_process_group,
        require_training,
    )
    from minisandbox.train.sandboxes import SandboxEnvironment  # noqa: PLC0415 - slow to import

    require_training(curve=bool(config.evaluation.tasks), vllm=config.engine == "vllm")
    with Progress() as progress:
        tasks, held_out = (_tasks(names, args) for names in (config.tasks, config.evaluation.tasks))
        if common_ids := sorted(set(tasks) & set(held_out)):
            hint = "divide the tasks: minisandbox tasks filter"
            raise InvalidValue(f"{common_ids[0]} is in both the training and the held-out set", hint=hint)
        environment = SandboxEnvironment(config, tasks, held_out, _machines(args, progress))
        result = train_rl(config, environment, tell=progress.note)
    leave_process_group()
    if not is_first():  # only rank 0 reports the result
        return exits.OK
    if result.scores:
        draw_curve({Path(config.out).name: result.scores}, Path(config.out) / "curve.png")
    if args.json:
        print_json(result)
        return exits.OK
    for score in result.scores:
        share = f"{score.reward:.1%} of {score.rollouts} held-out rollouts"
        put(f"step {score.step}: {share} resolved (+- {score.error:.1%})")
    put(f"{result.steps} steps; the model is in {result.model}")
    print_nodes(environment.reports)
    return exits.OK


def _machines(args: argparse.Namespace, progress: Progress) -> ImageOf | Cluster:
    """Return the source of sandboxes: a cluster, or a function that builds images on this machine."""
    if args.cluster is None:
        return Builder(Store.open(), progress, args.repo_mirrors).image_of
    return Cluster(address=args.cluster, mirrors=args.repo_mirrors, notice=progress.note)


def _tasks(names: Iterable[str], args: argparse.Namespace) -> dict[str, Task]:
    task_sets = (
        TaskSet.load(name, allow_local_sources=args.allow_local_sources, public_network=args.public_network)
        for name in names
    )
    return {task.instance_id: task for tasks in task_sets for task in tasks}


def _show_masks(config: SftConfig, count: int) -> None:
    """Print the first rows of the training data with their loss masks."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - an optional package

    from minisandbox.train.rows import read_rows, shown_mask  # noqa: PLC0415 - slow to import

    if not Path(config.model).is_dir():
        raise InvalidValue(f"model {config.model} is not a directory", hint="give a model's directory: --set model=DIR")
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    for row in islice((row for name in config.data for row in read_rows(Path(name))), count):
        put(f"{row.rollout}: {row.loss_tokens} of {len(row.ids)} tokens carry loss")
        for line in shown_mask(row, lambda token: repr(tokenizer.decode([token]))):
            put(f"  {line}")


def run_options(args: argparse.Namespace) -> int:
    """Print all options of a configuration."""
    if args.kind == "skyrl":
        from minisandbox.integrations.skyrl.config import SECTION, SandboxOptions  # noqa: PLC0415 - only `options skyrl` needs it

        options = list(describe(SandboxOptions, f"{SECTION}."))
    else:
        options = list(describe(KINDS[args.kind]))
    if args.json:
        print_json(options)
        return exits.OK
    put("| key | type | default | meaning |\n|---|---|---|---|")
    for option in options:
        put(f"| `{option.key}` | {option.kind} | {f'`{option.default}`' if option.default else ''} | {option.help} |")
    return exits.OK
