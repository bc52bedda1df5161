SELECT acquire_lock('nightly-report', 'psql', 30)
