-- What check_schema.sql compares.
-- $1 the role's search_path, $2 the schema that came first
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('pgxlock.search_path', $1::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.schema', $2::pg_catalog.text, true)
