"""Hosts on one machine, and what icom does on them."""
