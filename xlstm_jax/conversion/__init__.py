"""Conversion of parameters and configs from and to public implementations."""
