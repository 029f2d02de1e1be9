"""What the driver does, observed: one list of checks for a real GPU and for the emulated one.

``python tests/conformance [--driver=emulated|real] [CHECK ...]`` prints one JSON object a line, and on stderr whatever
differs from `expected.EXPECTED`. As a test it does the same for the driver that the tests run on. Where the two drivers
differ, the emulator is wrong.
"""
