"""A model at work in the front: its driver, the requests it has, their answers."""
