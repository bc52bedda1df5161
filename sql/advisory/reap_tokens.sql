SELECT /* schema */pgxlock_reap_advisory(1000, '/* session */'::pg_catalog.int8)
