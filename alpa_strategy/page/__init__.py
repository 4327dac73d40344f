"""The plan as a page: a Plan and its details as one self-contained HTML file."""
