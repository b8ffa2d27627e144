"""The way between a door, which is a process of its own, and the front."""
