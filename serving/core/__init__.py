"""Decisions without I/O. Standard library only: no clock, no log, no network, no global chance."""
