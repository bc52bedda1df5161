-- How old the oldest transaction id or multixact id of any database is; when all
-- are used up the server writes nothing any more.
SELECT d.datname::text, greatest(age(d.datfrozenxid), mxid_age(d.datminmxid))::bigint AS age
  FROM pg_database d ORDER BY age DESC LIMIT 1
