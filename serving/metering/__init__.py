"""Usage: what each request used and cost, written down so that nothing of it is lost or counted twice."""
