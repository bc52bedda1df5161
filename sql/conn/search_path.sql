-- From here on nothing is found but by its full name; only until the transaction
-- ends if $1 is true.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', $1)
