-- Tables of ours that another access method than PostgreSQL's own stores, in one text; '' for none.
-- $1 schema
SELECT coalesce(string_agg(c.relname || ' (' || a.amname || ')', ', ' ORDER BY c.relname), '')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_am a ON a.oid = c.relam
 WHERE n.nspname = $1::text AND c.relkind = 'r' AND a.amname <> 'heap'
   AND (starts_with(c.relname, 'pgxlock_') OR starts_with(c.relname, 'distributed_lock'))
