"""`make fuzz`: bad input on every socket of a sidecar, beside an engine and a reader that must stay right."""
