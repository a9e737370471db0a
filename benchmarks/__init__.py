"""Measurements of Intently itself; each writes its own results, with versions and date."""
