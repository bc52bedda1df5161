-- Takes away what 000009_turns.up.sql installed.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_change pg_catalog.record;
  v_hardened boolean;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);
  IF to_regprocedure(pg_catalog.format('%I.pgxlock_refused_batch(integer[], text[], bigint[])', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 9', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_function', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called, and others are changed.
  IF EXISTS (SELECT FROM pg_catalog.unnest('{"pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()",
                    "pgxlock_owner()", "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "grant_locks(text, text)"}'::text[]) f (signature)
               JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares', 'lock_holders', 'lock_waiters') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 9) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;

  v_hardened := pgxlock_hardened();
  FOR v_change IN SELECT * FROM (VALUES
      ('pgxlock_rights()', '[^\n]*(pgxlock_refused_batch|TABLE lock_(holders|waiters))[^\n]*\n'),
      ('pgxlock_objects()', '''lock_(holders|waiters)'', '),
      ('harden_locks()', '''lock_(holders|waiters)'', ')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  DROP VIEW lock_waiters, lock_holders;
  DROP FUNCTION pgxlock_refused_batch(integer[], text[], bigint[]);

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 8::bigint;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (8, false);
END $migration$;
