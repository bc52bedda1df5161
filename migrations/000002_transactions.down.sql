-- Takes away what 000002_transactions.up.sql installed. Refuses while there are
-- claims, unless the session says SET pgxlock.force = on: what was done once
-- would be done again.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  IF to_regclass(pg_catalog.format('%I.pgxlock_claims', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 2', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  IF EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user))
     OR EXISTS (SELECT FROM pg_proc p WHERE p.oid = to_regprocedure('pgxlock_check_unused()')::oid
                   AND p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 2) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  LOCK TABLE pgxlock_claims IN ACCESS EXCLUSIVE MODE;
  PERFORM pgxlock_check_unused();

  DROP FUNCTION lock_tx(text, interval, boolean, boolean), claim_once(text, interval, interval), purge_claims(interval, integer),
    pgxlock_vouch(), pgxlock_lock_timeout(timestamptz), pgxlock_deadline(interval);
  DROP TABLE pgxlock_claims;
  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 1::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (1, false);
END $migration$;
