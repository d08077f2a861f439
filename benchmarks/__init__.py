"""Bars that this project holds itself to, each measured on the real thing: `python -m benchmarks.NAME`.

A benchmark prints a table, writes JSON on request (harness.py) and exits with 1 when a judged bar fails. The full
form is the bar; `--quick` ends in five minutes beyond installs and engine starts and judges only what it can.
No benchmark reads a stored figure.
"""
