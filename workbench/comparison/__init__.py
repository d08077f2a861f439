"""Is B better than A: which runs make pairs, what forbids a comparison, its verdict."""
