"""The settings of the site: `make docs` builds README, docs/ and the pages of results/ into site/.

Its source is the whole repository, so that a link works here as it does where the files lie.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # notebooks' tensors are too small for several threads, which wait busily
sys.path.insert(0, str(Path(__file__).parent))

project = "mxstudy"
html_title = "mxstudy"
html_theme = "furo"
html_show_copyright = False
html_additional_pages = {"index": "redirect.html"}
templates_path = ["."]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "results/**.md"]
exclude_patterns = [".venv", "runs", "figures", "site", "mlartifacts", ".cache"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "reference"]
nb_execution_mode = "force"
nb_execution_in_temp = True  # so that runs of a notebook are not among the user's
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a page of results/ may begin with a mark
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "literal"
