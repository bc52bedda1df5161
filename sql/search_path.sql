-- From here on nothing is found but by its full name.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)
