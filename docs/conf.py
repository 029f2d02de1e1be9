"""`make docs`. The pages are meant to be read on a code host as well, so they are plain Markdown."""

import aiocuda_copy

project = "aiocuda_copy"
author = "The aiocuda_copy developers"
release = version = aiocuda_copy.__version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
myst_enable_extensions = ["strikethrough"]
html_theme = "alabaster"
suppress_warnings = ["misc.highlighting_failure"]
