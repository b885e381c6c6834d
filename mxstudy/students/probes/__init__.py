"""What is measured on a stack of students while it trains: a number for each replica, and nothing crosses between."""
