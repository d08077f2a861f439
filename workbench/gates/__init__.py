"""Gates for one release: gathers what was measured, judges it by the core, keeps the record, shows it to people.

kept sweeps, evaluations, drift checks → evidence → serving/core/policies/gate.py → record → MLflow, tags, a page
"""
