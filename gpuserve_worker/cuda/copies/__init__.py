"""Copies of one front's inputs and outputs to, from and within the device. No callable is called here."""
