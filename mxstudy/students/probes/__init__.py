"""Measurements on a stack of students while it trains: one number per replica, each from that replica alone."""
