-- The version of the schema.
SELECT /* schema */pgxlock_version()
