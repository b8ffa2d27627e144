"""What protocols of the wire and those who answer have in common: one request at its connection."""
