"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; those in which every cell starts with a digit are set flush right."""
    columns = range(len(header))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in columns]
    right = [all(row[column][:1].isdigit() for row in rows) for column in columns]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if flush_right else cell.ljust(width)
            for cell, width, flush_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
