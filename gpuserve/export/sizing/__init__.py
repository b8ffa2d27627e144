"""Every number and name of an export, computed from the configuration and its options, with its reason."""
