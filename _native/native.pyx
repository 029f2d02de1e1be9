# cython: language_level=3
"""The thin Python face of the native layer."""
