"""Many cells on one replica: their plan and limits, running and keeping them, and what a finished sweep tells."""
