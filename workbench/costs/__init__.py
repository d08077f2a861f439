"""What a token costs: prices from measured cells, the cost table and its published form, and what has no row yet."""
