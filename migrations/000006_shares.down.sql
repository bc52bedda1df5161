-- Takes away what 000006_shares.up.sql installed. It refuses while somebody shares a lease.
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
  IF to_regclass(pg_catalog.format('%I.distributed_lock_shares', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 6', coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'undefined_table', HINT = 'Name the schema first in search_path.';
  END IF;
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  -- Below, some of the functions are called, and others are changed.
  IF EXISTS (SELECT FROM pg_catalog.unnest('{"pgxlock_check_unused()", "pgxlock_session_key(bigint)", "pgxlock_rights()", "pgxlock_hardened()", "pgxlock_objects()", "pgxlock_grants()",
                     "release_all_locks(varchar)", "pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)", "pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])", "pgxlock_system_identifier()", "pgxlock_schema_version()","pgxlock_owner()", "pgxlock_settle(boolean)", "pgxlock_revoke(text)", "harden_locks()", "grant_locks(text, text)"}'::text[]) f (signature)
               JOIN pg_proc p ON p.oid = to_regprocedure(f.signature)::oid
              WHERE p.proowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) OR EXISTS (SELECT FROM pg_class c
              WHERE c.relnamespace = to_regnamespace(quote_ident(v_schema))::oid
                AND (c.relname::text IN ('distributed_locks', 'lock_leases', 'distributed_lock_shares', 'lock_shares') OR left(c.relname::text, 8) = 'pgxlock_')
                AND c.relowner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user)) THEN
    RAISE EXCEPTION 'pgxlock in schema % belongs to another role', quote_ident(v_schema)
      USING ERRCODE = 'insufficient_privilege', HINT = 'SET ROLE to the one that installed it, and run this again.';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 6) THEN
    RAISE EXCEPTION 'pgxlock: schema % has a later version; run its down files first', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state';
  END IF;

  LOCK TABLE distributed_lock_shares IN ACCESS EXCLUSIVE MODE;
  PERFORM pgxlock_check_unused();

  FOR v_change IN SELECT * FROM (VALUES
      ('release_all_locks(varchar)', ' \+ pgxlock_release_shares\(v_me\)'),
      ('pgxlock_publish_batch(integer[], text[], bigint[], integer[], text[], bigint, text, bigint)', '[^\n]*pgxlock_share_holders[^\n]*\n        UNION ALL\n'),
      ('pgxlock_rights()', '[^\n]*_share[^\n]*\n'),
      ('pgxlock_objects()', '''lock_shares'', ''distributed_lock_shares'', '),
      ('harden_locks()', '''lock_shares'', ''distributed_lock_shares'', |, distributed_lock_shares')) c (signature, added) LOOP
    EXECUTE regexp_replace(pg_get_functiondef(v_change.signature::regprocedure::oid), v_change.added, '', 'g');
  END LOOP;
  COMMENT ON FUNCTION release_all_locks(varchar) IS
    'Gives back every lease of the holder, or none (55P03) while a live one is asserted by an open transaction. Returns how many were still live.';
  DROP FUNCTION try_acquire_shared_lock(varchar, varchar, interval, jsonb), acquire_shared_lock(varchar, varchar, integer, jsonb),
    extend_shared_lock(varchar, varchar, integer), release_shared_lock(varchar, varchar),
    assert_shared_lock_held(varchar, varchar, bigint, boolean), pgxlock_share_each(text[], text[], bigint[], text[]),
    pgxlock_share_batch(text[], text[], bigint[], text[], bigint[]), pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[]),
    pgxlock_release_shares_batch(text[], text[], bigint[]), pgxlock_share_holders(text), pgxlock_reap_shares(interval, integer),
    pgxlock_lock_shares(text, boolean), pgxlock_release_share(text, text, bigint, boolean), pgxlock_release_shares(text), pgxlock_share_pin(text, text);
  DROP VIEW lock_shares;
  DROP TABLE distributed_lock_shares;

  v_hardened := pgxlock_hardened();

  ALTER FUNCTION pgxlock_system_identifier() STABLE;
  FOR v_change IN SELECT * FROM (VALUES
      (E'coalesce(g.held_by, l.holder), coalesce(g.ms, l.ms), v_firsts[w.n] IS NOT NULL\n', E'coalesce(g.held_by, l.holder), least(s.ms, coalesce(CASE WHEN s.ms IS NULL OR g.ms > 0::bigint THEN g.ms END, l.ms)), v_firsts[w.n] IS NOT NULL\n'),
      (E'AND l.expires_at > v_now OFFSET 0) l ON true\n     ORDER BY w.n;\n', $now$AND l.expires_at > v_now OFFSET 0) l ON true
      LEFT JOIN LATERAL (
        SELECT greatest(2::bigint, (date_part('epoch'::text, v_now - q.since) * 500::float8)::bigint) AS ms
          FROM pgxlock_waiters q
         WHERE NOT g.acquired AND q.kind = 0 AND q.name = w.name COLLATE "C" AND q.ticket = p_tickets[w.n]
           AND NOT EXISTS (SELECT FROM distributed_locks l
                            WHERE l.lock_name::text = w.name COLLATE "C" AND l.expires_at > v_now AND NOT pgxlock_in_change(l.xmax) OFFSET 0) OFFSET 0) s ON true
     ORDER BY w.n;
$now$)) c (before, now) LOOP
    EXECUTE replace(pg_get_functiondef('pgxlock_take_batch(text[], text[], bigint[], text[], bigint[])'::regprocedure::oid), v_change.now, v_change.before);
  END LOOP;
  EXECUTE regexp_replace(pg_get_functiondef('pgxlock_rights()'::regprocedure::oid), '[^\n]*pgxlock_(give_back_batch|in_change)[^\n]*\n', '', 'g');

  DROP FUNCTION pgxlock_give_back_batch(text[], text[], bigint[]), pgxlock_in_change(xid);

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 5::bigint;
  IF v_hardened THEN
    PERFORM set_config('lock_timeout', '1s', true);       -- for the tables that are in use
    PERFORM harden_locks();
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (5, false);
END $migration$;
