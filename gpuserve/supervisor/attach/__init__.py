"""Models that other programs of the same user serve through this server: both sides of the attachment."""
