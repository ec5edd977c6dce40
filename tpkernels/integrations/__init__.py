"""Plugins for other people's engines. The package itself imports none of them."""
