"""The inference callable: loading, requests and responses, model calls, metrics, and output checks."""
