"""What the templates of Kubernetes, Grafana and Prometheus are filled with, and their text as YAML."""
