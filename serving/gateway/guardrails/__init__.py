"""What a request's texts may not hold: checks before any GPU time, by the actions of core/policies/guardrails.py.

texts.py       collects a body's texts and writes redacted ones back
patterns.py    what is looked for: PII, keys, characters nobody sees, template tokens; blocklists
scanner.py     all active patterns over all texts in one pass of RE2: linear in the text, whatever it holds
off_loop.py    the checks that cost more: a toxicity model, presidio (child processes), a guard model (a pool)
screening.py   one request under one policy: flags, redactions, the refusal
screen.py      Guardrails: each tenant's policy, on the loop or off it
moderations.py POST /v1/moderations over the same checks
"""
