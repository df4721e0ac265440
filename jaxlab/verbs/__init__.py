"""The file tools of the ``jaxlab`` command, one module a field."""
