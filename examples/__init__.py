"""Small programs that show how kvcompile is used, and the demonstration."""
