SELECT /* schema */pgxlock_reap_sessions(1000, '/* session */'::pg_catalog.int8)
