"""A report rendered: for the terminal, as JSON, as a file. Renderers know the report; it knows none of them."""
