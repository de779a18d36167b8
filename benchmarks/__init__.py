"""What this costs, measured: run `python -m benchmarks [NAME...]`; one JSON line per bench on stdout."""
