"""The project folder: `pipeline.yaml`, `topics/`, `processors/`, `trainers/`, `infra/`."""
