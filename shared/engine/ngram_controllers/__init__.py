"""Decode controllers that draft from n-grams."""
