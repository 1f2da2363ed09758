"""``minisandbox train sft|rl|plan|options``: fine-tune models, and train them by reinforcement learning."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from minisandbox.cli.common import exits
from minisandbox.cli.common.builds import Builder
from minisandbox.cli.common.output import (
    Progress,
    add_json_option,
    human_seconds,
    print_json,
    print_table,
    put,
    require_positive,
    say,
)
from minisandbox.cli.common.run_options import add_cluster_argument, print_nodes
from minisandbox.cli.common.task_sets import add_local_sources_option
from minisandbox.errors import InvalidValue
from minisandbox.rollouts import ImageOf
from minisandbox.rollouts.cluster import Cluster
from minisandbox.store import Store
from minisandbox.tasks import Task, TaskSet
from minisandbox.train.config import RlConfig, SftConfig
from minisandbox.train.options import describe, load, packaged, to_yaml
from minisandbox.values import human_size

KINDS = {"sft": SftConfig, "rl": RlConfig}
_EXIT_SECONDS = 4.5
"""Time to write a checkpoint after Ctrl-C or SIGTERM."""


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
    plan = verbs.add_parser("plan", help="compute the memory and the time of a step, before anything starts")
    _add_common(plan)
    plan.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that share the weights (default: 1)")
    plan.add_argument("--gpu", metavar="NAME", help="A100, H100, H200 or L40S (default: this machine's device)")
    plan.add_argument("--tokens", type=int, metavar="N", help="tokens of each row (default: the longest allowed)")
    plan.set_defaults(run=run_plan)
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

    with _prompt_exit(args, config.out), Progress() as progress:
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
    from minisandbox.train.evaluation import draw_curve, draw_tasks  # noqa: PLC0415 - slow to import
    from minisandbox.train.rl import train_rl  # noqa: PLC0415 - slow to import
    from minisandbox.train.running import (  # noqa: PLC0415 - slow to import
        is_first,
        leave_process_group,
        require_training,
    )
    from minisandbox.train.sandboxes import SandboxEnvironment  # noqa: PLC0415 - slow to import

    require_training(curve=bool(config.evaluation.tasks), vllm=config.engine == "vllm")
    with _prompt_exit(args, config.out), Progress() as progress:
        tasks, held_out = (_tasks(names, args) for names in (config.tasks, config.evaluation.tasks))
        if common_ids := sorted(set(tasks) & set(held_out)):
            hint = "divide the tasks: minisandbox tasks filter"
            raise InvalidValue(f"{common_ids[0]} is in both the training and the held-out set", hint=hint)
        environment = SandboxEnvironment(config, tasks, held_out, _machines(args, progress))
        result = train_rl(config, environment, tell=progress.note, status=progress.status)
    leave_process_group()
    if not is_first():  # only rank 0 reports the result
        return exits.OK
    if result.scores:
        draw_curve({Path(config.out).name: result.scores}, Path(config.out) / "curve.png")
        draw_tasks(result.scores, Path(config.out) / "tasks.png")
    if args.json:
        print_json(result)
        return exits.OK
    for score in result.scores:
        share = f"{score.reward:.1%} of {score.rollouts} held-out rollouts"
        put(f"step {score.step}: {share} resolved (+- {score.error:.1%})")
    put(f"{result.steps} steps; the model is in {result.model}")
    print_nodes(environment.reports)
    return exits.OK


def run_plan(args: argparse.Namespace) -> int:
    """Print the memory and the time of a step; fail if it does not fit."""
    from minisandbox.train.plan import (  # noqa: PLC0415 - slow to import
        DEVICES,
        check_states,
        longest_allowed,
        plan_of,
        this_device,
    )

    require_positive(args, "gpus", "tokens")
    config = _either_config(args)
    if args.gpu is not None and args.gpu not in DEVICES:
        raise InvalidValue(f"--gpu {args.gpu} is unknown", hint=f"give one of {', '.join(DEVICES)}")
    device = DEVICES[args.gpu] if args.gpu else this_device(config)
    plan = plan_of(config, args.gpus)
    tokens = args.tokens or longest_allowed(config, plan)
    rows = [(name, human_size(size)) for name, size in plan.states.items() if size]
    rows.append(
        (f"activations, {plan.rows} rows of {tokens:,} tokens", human_size(plan.memory(tokens) - plan.memory(0)))
    )
    rows.append(("peak", human_size(plan.memory(tokens))))
    rows.append((f"available: {device.name}", human_size(device.memory)))
    rows.append(("longest row that fits", f"{plan.longest_row(device.memory):,} tokens"))
    rows.append(("training, a step", human_seconds(plan.training_seconds(device, tokens))))
    if isinstance(config, RlConfig):
        batch = config.engine_batch if config.engine == "transformers" else config.workers
        seconds = plan.sampling_seconds(device, tokens // 2, batch)
        rows.append((f"sampling half of each row, {batch} at once", human_seconds(seconds)))
    if args.json:
        kind = "rl" if isinstance(config, RlConfig) else "sft"
        print_json({"kind": kind, "tokens": tokens, "device": device, "plan": plan,
                    "peak": plan.memory(tokens), "longest_row": plan.longest_row(device.memory)})  # fmt: skip
    else:
        put(f"{plan.parameters / 1e9:.2f} billion parameters, {plan.trained / 1e9:.2f} trained; {args.gpus} GPUs")
        print_table(("on each device", "size"), rows, numbers=("size",))
    check_states(plan, device.memory, device.name, tokens)
    return exits.OK


def _either_config(args: argparse.Namespace) -> RlConfig | SftConfig:
    try:
        return load(RlConfig, args.config, _settings(args))
    except InvalidValue as error:
        with contextlib.suppress(InvalidValue):
            return load(SftConfig, args.config, _settings(args))
        raise error


@contextlib.contextmanager
def _prompt_exit(args: argparse.Namespace, out: str) -> Iterator[None]:
    """Exit within five seconds after Ctrl-C or SIGTERM, even if an operation of torch or a grading takes longer.

    The C-level signal handler writes the signal to a pipe, so this also works while the main thread runs no Python.
    """
    from minisandbox.train.running import resume_message  # noqa: PLC0415 - slow to import

    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    previous = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    finished = threading.Event()

    def watch() -> None:
        with open(receiver, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if number[0] in (signal.SIGINT, signal.SIGTERM) and not finished.wait(_EXIT_SECONDS):
                    is_sigterm = number[0] == signal.SIGTERM
                    say(f"minisandbox: {'terminated' if is_sigterm else 'interrupted'}; {resume_message(out)}")
                    os._exit(exits.TERMINATED if is_sigterm else exits.INTERRUPTED)

    threading.Thread(target=watch, name="exit", daemon=True).start()
    try:
        yield
        finished.set()
    except KeyboardInterrupt:  # the thread goes on: the interpreter may wait for other threads
        args.kept = resume_message(out)
        raise
    except BaseException:  # an error, reported by the caller
        finished.set()
        raise
    finally:
        signal.set_wakeup_fd(previous)
        os.close(sender)


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
    rows = [(option.key, option.kind.replace("\\|", "|"), option.default, option.help) for option in options]
    print_table(("key", "type", "default", "meaning"), rows)
    return exits.OK
