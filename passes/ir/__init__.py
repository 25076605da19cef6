"""What the passes work on: programs, sites, streams, plans, stages and remarks."""
