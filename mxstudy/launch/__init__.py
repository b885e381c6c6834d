"""From composed configs to runs: `start` plans the jobs, and a launcher runs or submits them."""
