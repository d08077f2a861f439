"""Results of other load generators: read, put into our terms, and kept apart from what we measured."""
