"""The captures: what is put in front of a module's own forward (sealed), or written into it (opened)."""
