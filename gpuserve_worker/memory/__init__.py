"""Shared memory of a worker: arenas, clients' regions, arrays over shared memory, outputs in it."""
