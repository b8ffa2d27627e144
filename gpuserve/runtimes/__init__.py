"""Model files that are served without code, one class for each kind of file."""
