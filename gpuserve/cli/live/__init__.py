"""Live views of a server: its start, its status, its events, the screen of ``top``, and keys."""
