"""Make the model that the journey trains: a Llama of two million random weights, and a tokenizer of its own.

python -m tests.journey.student EXAMPLES... -o DIR

The tokenizer learns from the conversations in files of examples, as `minisandbox trajectories collect` writes them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.learning.model import make_model, train_tokenizer

from minisandbox.trajectories.sources import read_examples


def main() -> None:
    """Write the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    texts = [message.content for path in options.examples for one in read_examples(path) for message in one.messages]
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(options.out)
    make_model(len(tokenizer), width=192).save_pretrained(options.out)


if __name__ == "__main__":
    main()
