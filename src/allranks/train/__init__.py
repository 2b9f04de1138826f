"""The worker: one process per rank, started by `accelerate launch`."""
