-- golang-migrate names its table with its schema. What it calls, nobody else's
-- functions shall answer.
SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)
