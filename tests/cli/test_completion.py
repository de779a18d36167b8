"""Completion scripts of every shell, and that what they ask for is answered."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KVEVENTS = str(Path(sys.executable).with_name("kvevents"))


def run(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [KVEVENTS, *arguments], capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **env}
    )
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    assert "_KVEVENTS_COMPLETE" in run("completion", shell)


def test_commands_and_options_are_completed() -> None:
    words = {"_KVEVENTS_COMPLETE": "bash_complete", "COMP_WORDS": "kvevents ta", "COMP_CWORD": "1"}
    assert run(**words).split() == ["plain,tail"]
    words |= {"COMP_WORDS": "kvevents tail --sum", "COMP_CWORD": "2"}
    assert run(**words).split() == ["plain,--summary"]
