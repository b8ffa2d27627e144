"""What protocols of the wire and those who answer have in common: transports, connections, one request."""
