"""The control plane: composes the routing table from what supervisors, registry and measurements say."""
