"""The HTTP door: JSON and binary bodies to requests, responses to bodies."""
