"""Evaluations: evidence about a model's answers. It may import serving; it logs nothing itself."""
