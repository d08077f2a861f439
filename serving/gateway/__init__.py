"""The front door: OpenAI-compatible HTTP in, one replica chosen by the core, its bytes relayed out."""
