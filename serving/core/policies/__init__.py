"""One policy a module; each is a plain function of a request and a view that returns a decision."""
