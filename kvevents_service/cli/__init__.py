"""The `kvevents` command."""

from __future__ import annotations

import sys

import click

from kvevents_service.cli.completion import completion
from kvevents_service.cli.demo import demo
from kvevents_service.cli.dialects import dialects
from kvevents_service.cli.doctor import doctor
from kvevents_service.cli.keys import keygen
from kvevents_service.cli.relay import relay
from kvevents_service.cli.serve import serve
from kvevents_service.cli.snapshot import snapshot
from kvevents_service.cli.tail import tail
from kvevents_service.cli.top import top
from kvevents_service.version import VERSION

EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION)
def kvevents() -> None:
    """A KV-cache offload sidecar and its event stream. See it work: `kvevents demo`."""


for command in (serve, relay, tail, top, snapshot, doctor, keygen, demo, dialects, completion):
    kvevents.add_command(command)


def main() -> None:
    """Entry point. Exit codes: 0 fine, 1 failed, 2 bad usage or settings, 130 interrupted; a closed pipe is 0."""
    try:
        sys.exit(kvevents.main(standalone_mode=False) or 0)
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
