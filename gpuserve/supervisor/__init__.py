"""The supervisor of a server: it owns the listeners, starts the front and the workers, and restarts them. It
holds no tensors and runs no user code.
"""
