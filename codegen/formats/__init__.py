"""Cache formats: how one tensor of K or V is stored in a page."""
