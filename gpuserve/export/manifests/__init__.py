"""The objects of Kubernetes, Grafana and Prometheus that an export writes."""
