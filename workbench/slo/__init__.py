"""The highest load that keeps an SLO: readings, what they say of the capacity, the next load, running the search."""
