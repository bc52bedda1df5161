-- Whether golang-migrate left its mark that a file failed.
SELECT coalesce(bool_or(m.dirty), false) FROM /* schema */pgxlock_migrations m
