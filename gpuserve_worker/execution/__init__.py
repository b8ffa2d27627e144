"""Execution of batches in a worker: loops, sessions with fronts, and the life of the process."""
