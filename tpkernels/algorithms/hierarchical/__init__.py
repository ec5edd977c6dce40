"""Two levels for groups that span hosts."""
