"""Fixtures of the emulated driver."""
