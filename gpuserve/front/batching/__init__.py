"""Which requests make a batch, when, and on which instance."""
