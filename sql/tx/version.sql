-- What the server says that it is.
SELECT pg_catalog.version()
