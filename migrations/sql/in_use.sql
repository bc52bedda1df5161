-- Refuses while leases are live, claims stand or sessions hold locks with tokens, unless the
-- session says so: the files are run one after the other, and only those that remove such ask.
DO $$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_live   bigint;
  v_claims bigint := 0;
  v_locks  bigint := 0;
BEGIN
  PERFORM pg_catalog.set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);
  PERFORM set_config('row_security', 'off', true);      -- what a policy hides is an error, and not nothing
  SELECT count(*) INTO v_live FROM distributed_locks l WHERE l.expires_at > clock_timestamp();
  IF to_regclass('pgxlock_claims') IS NOT NULL THEN
    SELECT count(*) INTO v_claims FROM pgxlock_claims c WHERE c.expires_at IS NULL OR c.expires_at > clock_timestamp();
  END IF;
  IF to_regclass('pgxlock_session_locks') IS NOT NULL THEN
    SELECT count(*) INTO v_locks FROM pgxlock_session_locks s WHERE NOT pg_try_advisory_xact_lock_shared(pgxlock_session_key(s.session));
  END IF;
  IF v_live > 0 AND coalesce(current_setting('pgxlock.force', true), '') <> 'on' THEN
    RAISE EXCEPTION 'pgxlock: live leases in schema %: %', quote_ident(v_schema), v_live
      USING ERRCODE = 'object_in_use', HINT = 'Stop their holders; or remove the leases under them: pgxlock migrate down --force.';
  END IF;
  IF v_claims > 0 AND coalesce(current_setting('pgxlock.force', true), '') <> 'on' THEN
    RAISE EXCEPTION 'pgxlock: claims in schema %: %', quote_ident(v_schema), v_claims
      USING ERRCODE = 'object_in_use', HINT = 'Without them what was done once can be done again. To drop them: pgxlock migrate down --force.';
  END IF;
  IF v_locks > 0 AND coalesce(current_setting('pgxlock.force', true), '') <> 'on' THEN
    RAISE EXCEPTION 'pgxlock: session locks with tokens in schema %: %', quote_ident(v_schema), v_locks
      USING ERRCODE = 'object_in_use', HINT = 'Stop their holders; or leave them without their fences: pgxlock migrate down --force.';
  END IF;
END $$
