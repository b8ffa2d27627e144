"""Questions to a real GPU, whose answers this server is built on. Nothing is judged here."""
