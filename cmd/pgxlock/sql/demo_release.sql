SELECT release_lock('nightly-report', 'psql')
