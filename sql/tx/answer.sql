-- The answer of the block before it: the number of rows.
SELECT pg_catalog.generate_series(1, pg_catalog.current_setting('pgxlock.answer')::int)
