"""Which requirements and files an environment with PyTorch has, where it is to have no CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.errors import InvalidValue
from minisandbox.images import Interpreter, find_interpreter
from minisandbox.images.python.torch_builds import is_for_cpu, without_cuda
from minisandbox.images.steps import install_step, python_step, requirements_step
from minisandbox.spec import Install, InstallPython, InstallRequirements, LocalSource, PythonRecipe
from minisandbox.values import WORKDIR


def test_libraries_of_cuda_go_and_what_only_sounds_alike_stays() -> None:
    gone = ("nvidia-cublas-cu12==12.1.3.1", "nvidia_cudnn_cu12==8.9", "nvidia-nccl-cu12==2.18", "triton==2.1.0")
    stays = ("nvidia-ml-py==12.5", "numpy==1.26.4", "triton-model-navigator==0.9", "torchmetrics==1.4+local")
    assert without_cuda((*gone, *stays)) == stays


def test_a_pin_of_a_build_becomes_one_of_its_version() -> None:
    lines = ("torch==2.3.1+cu121", "torchvision === 0.18.1+cu121 ; python_version > '3'", "torch>=2,!=2.1+cu118")
    assert without_cuda(lines) == ("torch==2.3.1", "torchvision === 0.18.1 ; python_version > '3'", lines[2])


@pytest.mark.parametrize(
    ("filename", "kept"),
    [
        ("torch-2.3.1+cpu-cp311-cp311-linux_x86_64.whl", True),
        ("torch-2.3.1+cpu.cxx11.abi-cp311-cp311-linux_x86_64.whl", False),
        ("torch-2.3.1+cu121-cp311-cp311-linux_x86_64.whl", False),
        ("torch-2.3.1-cp311-cp311-manylinux1_x86_64.whl", False),
        ("torch-2.3.1.tar.gz", False),
    ],
)
def test_which_files_have_no_cuda(filename: str, kept: bool) -> None:
    assert is_for_cpu("torch", filename) is kept


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    return find_interpreter(">=3.11")


def test_it_is_part_of_the_hash_where_it_can_matter(interpreter: Interpreter) -> None:
    def definitions(recipe: PythonRecipe) -> list[object]:
        python, requirements, install = (
            one for one in recipe.recipe().steps if isinstance(one, InstallPython | InstallRequirements | Install)
        )
        assert isinstance(python, InstallPython)
        assert isinstance(requirements, InstallRequirements)
        assert isinstance(install, Install)
        return [
            python_step(python, interpreter).definition,
            requirements_step(requirements, interpreter).definition,
            install_step(install, interpreter, "", WORKDIR).definition,
        ]

    source = LocalSource(Path("/src"))
    plain = PythonRecipe(python="3.11", requirements=("torch==2.3.1",), source=source, install=("x",))
    one, other = definitions(plain), definitions(replace(plain, torch_backend="cpu"))
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [True, False, False]
    pinned = PythonRecipe(python="3.11", requirements=("numpy==1.26.4",), complete=True, source=source, install=("x",))
    one, other = definitions(pinned), definitions(replace(pinned, torch_backend="cpu"))
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [True, True, False]


def test_another_backend_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'cu121'"):
        PythonRecipe(torch_backend="cu121").recipe()
