-- Whether golang-migrate left its mark that a file failed, and whether no version is recorded.
SELECT coalesce(bool_or(m.dirty), false), count(*) = 0 FROM /* schema */pgxlock_migrations m
