"""Inference in a door that is a process of its own: its side, and that of the front."""
