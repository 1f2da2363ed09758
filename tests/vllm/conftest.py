"""A small model, and a real vLLM that serves it on processors: `make test-vllm` makes an environment with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kernel.grading.conftest import images, smith, smith_image, source, store  # noqa: F401 - fixtures

from minisandbox.models import TokenRow
from minisandbox.models.engine import recompute_logprobs
from minisandbox.train.rows import TrainingRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = 1e-4
CONTEXT = 4096
_START = 900.0  # half a minute on a machine that does nothing else
# One GiB is plenty for a model of three megabytes: by default vLLM takes half of the memory. Several threads wait for
# each other by spinning: minutes for an answer where other processes want the processors.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, a tokenizer and a chat template, as save_pretrained writes them."""
    from tests.unit.tiny_model import tiny_tokenizer, torch, transformers  # noqa: PLC0415 - heavy

    directory = tmp_path_factory.mktemp("policy")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    tokenizer.pad_token = tokenizer.eos_token
    # vLLM's attention on processors knows heads of 32, 64 and more. transformers opens tokenizers of Qwen with a token
    # of its own, which is beyond this vocabulary
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=None,
            eos_token_id=1, initializer_range=0.15, tie_word_embeddings=False, dtype="float32",
        )
    )  # fmt: skip
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


# --- servers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers.

    Attributes:
        url: of its API.
        name: what it calls the model.
        log: the file that holds its output.
    """

    url: str
    name: str
    log: Path


@contextlib.contextmanager
def vllm_server(policy: Path, log: Path, *words: str) -> Iterator[Served]:
    """Serve a model until the block ends; a server that does not start fails the test with the end of its log.

    Args:
        policy: the model's directory.
        log: the file for its output.
        words: more of its command line.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # `vllm serve` takes the metadata of a distribution named vllm, which vllm-cpu has not
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(policy),
        "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--generation-config", "vllm", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16",
        *words,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        _wait(process, port, log)
        yield Served(f"http://127.0.0.1:{port}/v1", "policy", log)
        assert process.poll() is None, f"the server ended by itself:\n{end_of(log)}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the engine is a process of its own
        process.wait()


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode} before it answered:\n{end_of(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not answer within {_START:g} s:\n{end_of(log)}")


def end_of(log: Path) -> str:
    """The last lines of a server's output."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:])


@pytest.fixture(scope="session")
def server(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server that most tests share."""
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    words = (
        "--logprobs-mode", "processed_logprobs", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        # a random model would fill a call with white space
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )  # fmt: skip
    with vllm_server(policy, log, *words) as served:
        yield served


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the server's log with each failure."""
    report = yield
    served = getattr(item, "funcargs", {}).get("server")
    if report.failed and isinstance(served, Served):
        report.sections.append(("log of vLLM", end_of(served.log)))
    return report


# --- agreement -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Agreement:
    """Compares log-probabilities that vLLM reports with those that transformers computes once more.

    Attributes:
        gaps: for each name, the difference of each sampled token.
    """

    model: PreTrainedModel
    gaps: dict[str, list[float]] = field(default_factory=dict)

    def check(self, name: str, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> None:
        """Check rows; every one can be trained on, and no token differs by more than the tolerance.

        Args:
            name: under which the summary counts them.
            rows: what was captured.
            temperature: what they were sampled with.
        """
        assert rows, name
        found = self.gaps.setdefault(name, [])
        for number, row in enumerate(rows):
            TrainingRow.of(row, rollout=f"{name}.{number}").check()
            again = recompute_logprobs(self.model, row, temperature=temperature)
            found += [abs(a - b) for a, b, carries in zip(row.logprobs, again, row.mask, strict=True) if carries]
        assert max(found) <= TOLERANCE, f"{name}: {max(found):.2e}"


_agreement = pytest.StashKey[Agreement]()


@pytest.fixture(scope="session")
def agreement(policy: Path, pytestconfig: pytest.Config) -> Agreement:
    """What the tests compare with; the summary prints what they found."""
    import torch  # noqa: PLC0415 - heavy
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    return pytestconfig.stash.setdefault(_agreement, Agreement(model))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how far vLLM and transformers differ."""
    found = config.stash.get(_agreement, None)
    if found is None or not found.gaps:
        return
    terminalreporter.section("log-probabilities of vLLM and of transformers, differences per sampled token")
    for name, gaps in found.gaps.items():
        mean = sum(gaps) / len(gaps)
        terminalreporter.line(f"{name:24} worst {max(gaps):.2e}  mean {mean:.2e}  tokens {len(gaps)}")
