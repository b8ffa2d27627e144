"""The health port: probes are answered in a thread of their own."""
