"""The answers of `--help NAME` and the reference on the site, read from the schema and the files of conf/."""
