"""Why cells of scripts/paper_table.py are more than a quarter off the paper's figure: (cell, column) -> reason."""

EXPLANATIONS: dict[tuple[str, str], str] = {}
