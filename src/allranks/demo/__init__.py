"""The demonstration: a small real model, a data set of our own making, an injected fault."""
