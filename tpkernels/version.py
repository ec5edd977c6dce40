"""The version, for those within the package who need it."""

VERSION = "0.1.0"
