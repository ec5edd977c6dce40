"""Which algorithm a call runs: problems, plans, measured times. Pure, but for the file of times."""
