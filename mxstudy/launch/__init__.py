"""From composed configs to runs: `start` has them planned, and a launcher do what is to be done."""
