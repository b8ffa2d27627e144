"""Shared memory of a worker: arenas, clients' regions, input arrays over shared memory and outputs written to
it.
"""
