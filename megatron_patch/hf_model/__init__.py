"""The configuration and modelling files that an export carries: they import nothing of this package."""
