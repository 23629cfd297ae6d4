"""The command line: thin commands over `runtime` and `project`."""
