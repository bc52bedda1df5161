-- The version that a newer program has recorded, if one has.
SELECT max(m.version) FROM /* schema */pgxlock_migrations m
 WHERE NOT m.dirty AND m.version > current_setting('pgxlock.newest')::bigint HAVING max(m.version) IS NOT NULL
