"""Metrics: counters of models and instances, rates, the Prometheus page, and pushes to a collector."""
