"""`kvevents completion`: what a shell needs to complete our commands and options; click writes it."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
NAME = "kvevents"


@click.command(short_help="Completion for a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print a script that completes `kvevents` in a shell.

    \b
    source <(kvevents completion bash)                                    # in ~/.bashrc
    source <(kvevents completion zsh)                                     # in ~/.zshrc
    kvevents completion fish > ~/.config/fish/completions/kvevents.fish
    """
    made = get_completion_class(shell)
    assert made is not None, "click knows these shells"
    click.echo(made(context.find_root().command, {}, NAME, f"_{NAME.upper()}_COMPLETE").source())
    return 0
