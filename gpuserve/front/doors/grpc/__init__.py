"""The gRPC door: messages to requests, responses to messages."""
