"""Small modules that every other part uses; they import nothing of the package but each other."""
