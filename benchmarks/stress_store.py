"""Many processes ask for the same layers at once, while some of them are killed and others collect.

    python benchmarks/stress_store.py [--processes 60] [--layers 10] [--directory DIR]

First nobody is killed: each layer must be published exactly once, and every process succeed. Then makers are killed at
random: the rest must succeed, and nothing half-made be visible. A verifier and a collector run all the time. At the end
every file is read and compared, and a collection must leave nothing but what is published.

Exit status 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from minisandbox.store import ImageRecord, LayerRecord, Made, Store, step_key
from minisandbox.store.collect import collect
from minisandbox.store.verify import verify

FILES, COMMON = 60, 40
LONGEST = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run.

    Attributes:
        makers: how many processes asked for all layers.
        failed: how many of them ended other than well, those that were killed left out.
        killed: how many were killed.
        made: how many times a layer was published.
        damaged: how many layers are not what was published.
        leftovers: what is left besides what is published.
    """

    makers: int
    failed: int
    killed: int
    made: int
    damaged: int
    leftovers: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether everything that must hold does."""
        return not self.failed and not self.damaged and not self.leftovers


def layer_key(number: int) -> str:
    """The key of a layer."""
    return step_key(None, {"layer": number})


def make_layers(root: Path, log: Path, layers: int, seed: int) -> None:
    """What each process does: ask for every layer, in an order of its own."""
    store, order = Store.open(root), list(range(layers))
    random.Random(seed).shuffle(order)
    for number in order:

        def make(work: Path, number: int = number) -> Made:
            tree = work / "tree"
            tree.mkdir()
            for count in range(FILES):
                path = tree / f"file{count}"
                # most files are equal in all layers, so that makers meet in the pool
                path.write_bytes((f"{count} {0 if count < COMMON else number}\n" * 200).encode())
                os.utime(path, (946684800, 946684800))
            time.sleep(0.05)
            return Made(tree)

        record, made = store.ensure_layer(layer_key(number), parent=None, step={"layer": number}, make=make)
        check(store, record, number)
        if made:
            with log.open("a", encoding="ascii") as out:
                out.write(f"{number}\n")


def check(store: Store, record: LayerRecord, number: int) -> None:
    """A layer that is visible is whole."""
    tree = store.layer_tree(record.key)
    names = os.listdir(tree)
    content = (tree / f"file{FILES - 1}").read_bytes()
    if len(names) != FILES or content != (f"{FILES - 1} {number}\n" * 200).encode():
        raise SystemExit(f"layer {number} is half there: {len(names)} files")


def disturb(root: Path, log: Path) -> None:
    """What one more process does: verify and collect until it is told to stop."""
    store = Store.open(root)
    while not log.with_suffix(".done").exists():
        if damage := verify(store).damaged:
            raise SystemExit(f"damaged: {damage}")
        collect(store, grace=LONGEST)
        Store.open(root)


def stress(root: Path, *, processes: int, layers: int, kill: bool) -> Outcome:
    """Run processes against a new store.

    Args:
        root: its directory.
        processes: how many at once.
        layers: how many they all want.
        kill: whether makers are killed at random; new ones take their places, so that in the end all have asked.
    """
    store = Store.open(root)
    log = root.parent / f"{root.name}.log"
    running = {start("make", root, log, layers, seed) for seed in range(processes)}
    disturber = start("disturb", root, log, layers, 0)
    chance, killed, failed = random.Random(processes), 0, 0
    deadline, victims = time.monotonic() + LONGEST, processes // 2 if kill else 0
    while running and time.monotonic() < deadline:
        time.sleep(chance.uniform(0.01, 0.05))
        if killed < victims:
            victim = chance.choice(sorted(running, key=lambda process: process.pid))
            victim.send_signal(signal.SIGKILL)
            if victim.wait() == -signal.SIGKILL:
                killed += 1
                running.discard(victim)
                running.add(start("make", root, log, layers, processes + killed))
        ended = {process for process in running if process.poll() is not None}
        failed += sum(process.returncode != 0 for process in ended)
        running -= ended
    log.with_suffix(".done").touch()
    for process in running:  # out of time
        process.kill()
        process.wait()
    failed += len(running) + (disturber.wait(LONGEST) != 0)
    return judge(store, log, layers, processes, failed, killed)


def start(what: str, root: Path, log: Path, layers: int, seed: int) -> subprocess.Popen[bytes]:
    """Start one process."""
    arguments = (what, str(root), str(log), str(layers), str(seed))
    return subprocess.Popen([sys.executable, __file__, "--as", *arguments], stdin=subprocess.DEVNULL)


def judge(store: Store, log: Path, layers: int, processes: int, failed: int, killed: int) -> Outcome:
    """Look at what is left."""
    keys = tuple(layer_key(number) for number in range(layers))
    store.put_image(ImageRecord("all", keys[-1], keys, (), "/testbed", None, "", time.time()))
    Store.open(store.root)
    collect(store, grace=0)
    damaged = len(verify(store, full=True).damaged) + len(set(keys) ^ set(store.layer_keys()))
    left = [f"staging/{name}" for name in os.listdir(store.root / "staging") if name != ".gate"]
    left += [f"locks/{name}" for name in os.listdir(store.root / "locks")]
    left += [f"quarantine/{name}" for name in os.listdir(store.root / "quarantine")]
    left += [f"orphan {path.name}" for shard in store.pool.shards() for path in shard.iterdir() if alone(path)]
    made = len(log.read_text(encoding="ascii").splitlines())
    # a maker that is killed between its publishing and its note in the log made it all the same
    made = max(made, layers) if killed else made
    return Outcome(processes, failed, killed, made, damaged, tuple(left))


def alone(path: Path) -> bool:
    """Whether no layer has an object."""
    return path.lstat().st_nlink == 1


def main() -> int:
    """Run both kinds and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=60)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--directory", type=Path, default=Path.home(), help="where the stores are made (default: home)")
    parser.add_argument("--as", nargs=5, metavar="ARGUMENT", dest="role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        what, root, log, layers, seed = args.role
        if what == "make":
            make_layers(Path(root), Path(log), int(layers), int(seed))
        else:
            disturb(Path(root), Path(log))
        return 0
    good = True
    place = Path(tempfile.mkdtemp(prefix="minisandbox-stress-", dir=args.directory))
    try:
        for kill in (False, True):
            begun = time.monotonic()
            outcome = stress(place / f"store-{kill}", processes=args.processes, layers=args.layers, kill=kill)
            good = good and outcome.good and outcome.made == args.layers
            print(
                f"{'makers killed' if kill else 'nobody killed'}: {outcome}, {time.monotonic() - begun:.1f} s",
                flush=True,
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print("good" if good else "NOT good")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
