"""KV-cache offload sidecar and its event stream."""
