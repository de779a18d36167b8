"""`make soak`: a sidecar under traffic, readers and deaths for some minutes, and what must be true at the end."""
