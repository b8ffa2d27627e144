"""What only workers of Triton's Python models have on their path: names that belong to another project."""
