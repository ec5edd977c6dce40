"""Small modules used by the rest of the package. They import only modules of this folder."""
