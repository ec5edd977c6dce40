"""What has been measured on this machine: see `table` for how a choice follows from it, `store` for
where it is kept, `machine` for what it is valid for."""
