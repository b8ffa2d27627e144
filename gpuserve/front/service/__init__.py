"""The inference service: inference, models, health and control for every protocol."""
