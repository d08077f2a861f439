"""The best engine flags, by successive halving: the choice, pure, and running it on real engines."""
