"""Self-contained HTML: drawn from cells (draw), made and logged (publish), pages without scripts (static)."""
