"""The live page without its looks: what it shows, sampled once for all who watch."""
