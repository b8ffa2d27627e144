"""The vocabulary of the v2 protocol: requests, responses, their limits and checks."""
