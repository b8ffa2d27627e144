"""The settings of a server as a whole, what must hold for them, and what applies them to a process."""
