"""What an inference callable is given, under PyTriton's names."""
