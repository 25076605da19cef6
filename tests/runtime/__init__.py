"""Tests of the page store, the handles and the operators on them."""
