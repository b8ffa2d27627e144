"""What sections measure with: servers of their models, requests and who sends them, memory of clients."""
