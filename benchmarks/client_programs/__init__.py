"""What `benchmarks.clients` runs in other people's environments: each file uses one client library and nothing of ours.

PROGRAM        reads BASE_URL, API_KEY, MODEL and EMBEDDER from its environment
its output     a JSON line a check: {"check": "...", "why": null or what went wrong}
"""
