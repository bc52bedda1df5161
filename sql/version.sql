-- The version of the schema.
SELECT /* schema */pgxlock_schema_version()
