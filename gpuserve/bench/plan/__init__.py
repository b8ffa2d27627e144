"""What is to be measured: levels, arrivals, and what can be wrong with it."""
