-- Tables in which golang-migrate, or a program that writes as it does, keeps the
-- version: each has an advisory lock of its own, which is taken while it migrates. Any role that
-- may create tables can make one, so at most 1,000.
SELECT current_database()::text AS database, n.nspname::text AS schema, c.relname::text AS migrations
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relnatts = 2
   AND EXISTS (SELECT FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid
                  AND a.attname = 'version'
                  AND a.atttypid = 'bigint'::regtype
                  AND NOT a.attisdropped)
   AND EXISTS (SELECT FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid
                  AND a.attname = 'dirty'
                  AND a.atttypid = 'boolean'::regtype
                  AND NOT a.attisdropped)
 LIMIT 1000
