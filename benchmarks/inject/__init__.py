"""Faults planted in released architectures, call by call, and what a check says of each."""
