-- Whether leases can be shared.
-- $1 schema
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1::text AND c.relname = 'lock_shares' AND c.relkind = 'v')
