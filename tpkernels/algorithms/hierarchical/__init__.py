"""Two levels for groups that span hosts: shared memory within a host, messages between hosts."""
