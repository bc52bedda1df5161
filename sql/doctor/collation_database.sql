-- The same for the collation of the database, from PostgreSQL 15 on: its version
-- then and now, and which indexes of ours have it.
-- $1 schema
SELECT coalesce(d.datcollversion, ''), coalesce(pg_database_collation_actual_version(d.oid), ''),
       coalesce((SELECT string_agg(DISTINCT i.indexrelid::regclass::text, ', ')
          FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_index i ON i.indrelid = c.oid
         WHERE n.nspname = $1::text AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock'))
           AND 'pg_catalog.default'::regcollation::oid = ANY (i.indcollation)), '')
  FROM pg_database d WHERE d.datname = current_database()
