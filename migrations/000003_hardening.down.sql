-- Takes away what 000003_hardening.up.sql installed. What was hardened is not any
-- more: roles that grant_locks() named have rights on the tables instead.
DO $migration$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_function pg_catalog.text;
  v_made     pg_catalog.text[] := '{"harden_locks()", "soften_locks()", "grant_locks(text, text)", "revoke_locks(text)", "pgxlock_settle(boolean)", "pgxlock_revoke(text)",
      "pgxlock_owner()", "pgxlock_grants()", "pgxlock_objects()", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_holders(text)",
      "pgxlock_release_batch(text[], text[], bigint[])", "pgxlock_renew_batch(text[], text[], bigint[], bigint[])",
      "pgxlock_acquire_batch(text[], text[], bigint[], text[])", "pgxlock_next_tokens(bigint)"}';
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the lock is taken
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  IF to_regprocedure(pg_catalog.format('%I.harden_locks()', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 3', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_function', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called.
  IF EXISTS (SELECT FROM pg_catalog.unnest(v_made || '{pgxlock_check_unused()}'::text[]) f (signature) JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 3) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;
  PERFORM pgxlock_check_unused();

  IF pgxlock_hardened() THEN
    PERFORM soften_locks();
  END IF;
  FOREACH v_function IN ARRAY '{"try_acquire_lock(varchar, varchar, interval, jsonb)", "pgxlock_renew(text, text, bigint, interval)",
      "pgxlock_release(text, text, bigint)", "release_all_locks(varchar)", "assert_lock_held(varchar, varchar, bigint, boolean)",
      "reap_expired_locks(interval, integer)", "repair_lock_tokens()", "pgxlock_next_token()", "claim_once(text, interval, interval)",
      "purge_claims(interval, integer)"}'::text[] LOOP
    EXECUTE 'ALTER FUNCTION ' || v_function || ' RESET row_security';
  END LOOP;
  FOREACH v_function IN ARRAY v_made LOOP
    EXECUTE 'DROP FUNCTION ' || v_function;
  END LOOP;
  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 2::bigint;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (2, false);
END $migration$;
