"""How a planned call is carried out: one file per algorithm, with one function per op."""
