"""What depends on the inside of other people's packages: a file a package, named after it.

Each says why it must, and with which versions it was checked; tests/compat/ fails where a new version does that part
otherwise. After an upgrade run `python -m pytest tests/compat`, and change nothing but this folder.
"""
