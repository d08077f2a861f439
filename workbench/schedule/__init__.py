"""Scheduled runs: a notebook by the clock, set against the run that was accepted, with an alert when it is worse.

book.py      schedules on disk; history.py  their runs
cron.py      when a run is due, and which one never came
crontab.py   the lines that make cron start them
job.py       one run: lock, child (child.py, runner.py), comparison (rule.py), retention and index (shelf.py), alerts
"""
