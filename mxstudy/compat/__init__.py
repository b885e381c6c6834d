"""Code that depends on the internals of other packages, in one file per package, named after it.

Each file says why it needs them and with which versions it was checked; tests/compat/ fails if a new version behaves
differently. After an upgrade run `python -m pytest tests/compat`, and change nothing outside this folder.
"""
