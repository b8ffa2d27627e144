"""What waits for a model, in which order and within which limits. No batch is formed here."""
