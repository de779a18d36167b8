"""`python -m kvevents_service` is the `kvevents` command."""

from kvevents_service.cli import main

main()
