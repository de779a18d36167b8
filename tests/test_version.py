"""A checkout on the path works without an install, and says that it does not know its version."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvevents_service.version import UNKNOWN, VERSION

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is installed here, and our modules without what says that they are."""
    folder = tmp_path_factory.mktemp("packages")
    for installed in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(installed).iterdir():
            if "kvevents_service" not in path.name:
                (folder / path.name).symlink_to(path)
    (folder / "kvevents_service").symlink_to(ROOT / "kvevents_service")
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "kvevents_service", "--version"], f"version {UNKNOWN}"),
        (["-m", "kvevents_service", "serve", "--print-config"], f"# kvevents {UNKNOWN}: "),
        (["-c", "import kvevents_service.service.instruments as i; print(i.VERSION)"], UNKNOWN),
    ],
    ids=["version", "print-config", "state"],
)
def test_without_an_install(packages: Path, words: list[str], said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-S", *words],
        cwd=packages, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, said in done.stdout) == (0, True), done.stderr


def test_with_an_install() -> None:
    assert VERSION[0].isdigit()
