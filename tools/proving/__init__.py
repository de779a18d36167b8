"""What the soak and the fuzzer share: a sidecar process under watch, and the end's comparison."""
