"""The inference callable: where it comes from, what it is given, what it gives back."""
