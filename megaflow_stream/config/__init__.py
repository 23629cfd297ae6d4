"""Configuration: defaults < `pipeline.yaml` < environment < flags, and where each value came from."""
