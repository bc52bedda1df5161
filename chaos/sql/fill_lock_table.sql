SELECT count(pg_advisory_lock(77, i)) FROM generate_series(1, 10000000) i
