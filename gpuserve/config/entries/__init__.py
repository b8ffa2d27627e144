"""What may stand in a config file: one class a mapping, one field a key."""
