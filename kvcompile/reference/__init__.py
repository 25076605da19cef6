"""Plain-torch oracles that read like the papers and share no code with a kernel."""
