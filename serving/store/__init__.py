"""The Redis-protocol store and the files that stand in for it: what planes publish to each other."""
