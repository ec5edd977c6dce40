"""Select the algorithm of a call: problems, plans, measured times. Pure, except for `store`."""
