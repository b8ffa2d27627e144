"""The launching process: it owns the listeners, the front and the workers, and restarts them. It holds no
tensor and runs no user code.
"""
