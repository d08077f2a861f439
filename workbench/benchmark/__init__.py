"""One load on one endpoint: what to put on what (request, target), running it, and its result."""
