"""pilotfish's checkpoints: what a worker needs to continue a job where it stands."""
