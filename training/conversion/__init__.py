"""Conversion to and from other toolkits, one file each."""
