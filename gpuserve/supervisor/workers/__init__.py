"""The workers of models: each kept alive, grouped by model, fenced from GPUs that are lost."""
