"""The serving layer: gateway, router, engine replicas, control plane. It runs without the workbench."""
