-- From here on the schema comes first, and no other, so that nobody's objects come before
-- those of pg_catalog.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('%I', pg_catalog.current_setting('pgxlock.schema')), true)
