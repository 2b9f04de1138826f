"""Which samples make a step, and how they are spread over ranks and micro-batches: pure functions."""
