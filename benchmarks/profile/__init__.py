"""The Python calls of one small request in the front."""
