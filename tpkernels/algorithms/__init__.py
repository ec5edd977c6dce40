"""How a planned call is carried out. One file per algorithm, one function per op in it."""
