-- What the role's search_path says, and the schema that comes first.
SELECT pg_catalog.current_setting('search_path'), coalesce(pg_catalog.current_schema()::pg_catalog.text, '')
