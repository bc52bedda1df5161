-- Locking inside the caller's transaction, for callers in any language: lock_tx()
-- takes an advisory lock with a bounded wait, claim_once() lets exactly one
-- committed transaction have a key, purge_claims() ends old claims.
--
-- Needs 000001_leases.up.sql. What is said there about how to run it, and the
-- rules that its functions keep, holds here as well.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_rest   pg_catalog.text := v_path;
  v_first  pg_catalog.text;
  v_foreign pg_catalog.text;

  -- Asked before anything is made, and again when all is made and nothing was
  -- read or written but definitions.
  v_check  pg_catalog.text := $check$
    SELECT string_agg(o.name || ' (owned by ' || quote_ident(pg_get_userbyid(o.owner)::text) || ')', ', ')
      FROM (SELECT c.relname::text AS name, c.relowner AS owner FROM pg_class c
             WHERE c.relnamespace = to_regnamespace(quote_ident($1))::oid
               AND (c.relname::text IN ('distributed_locks', 'lock_leases') OR left(c.relname::text, 8) = 'pgxlock_')
            UNION ALL
            SELECT p.oid::regprocedure::text, p.proowner
              FROM pg_catalog.unnest('{"advisory_lock_key(text)", "pgxlock_check(text, text)", "pgxlock_schema_version()",
                            "lock_tx(text, interval, boolean, boolean)", "claim_once(text, interval, interval)",
                            "purge_claims(interval, integer)", "pgxlock_deadline(interval)", "pgxlock_lock_timeout(timestamptz)",
                            "pgxlock_vouch()"}'::text[]) f (signature)
              JOIN pg_proc p ON p.oid = to_regprocedure(pg_catalog.format('%I.', $1) || f.signature)::oid) o
     WHERE o.owner <> (SELECT u.oid FROM pg_roles u WHERE u.rolname = current_user) $check$;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  PERFORM set_config('lock_timeout', '2s', true);
  PERFORM set_config('client_min_messages', 'warning', true);
  PERFORM set_config('quote_all_identifiers', 'off', true);

  -- The schema that was named must be the one that gets the objects.
  LOOP
    v_first := substring(v_rest FROM '^[[:space:]]*("(?:[^"]|"")*"|[^",[:space:]]+)');
    v_rest  := substring(v_rest FROM '^[[:space:]]*(?:"(?:[^"]|"")*"|[^",[:space:]]+)[[:space:]]*,(.*)$');
    v_first := CASE WHEN v_first LIKE '"%' THEN replace(substr(v_first, 2, length(v_first) - 2), '""', '"')
                    ELSE lower(v_first) END;
    EXIT WHEN v_first IS DISTINCT FROM '$user';
    v_first := current_user;
    EXIT WHEN EXISTS (SELECT FROM pg_namespace WHERE nspname = current_user);
  END LOOP;
  IF v_schema IS NULL OR left(v_schema, 3) = 'pg_' OR v_first IS DISTINCT FROM v_schema THEN
    RAISE EXCEPTION 'pgxlock: cannot tell which schema to install into: search_path is %, its first usable schema is %',
        quote_literal(v_path), coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'invalid_schema_name',
            HINT = 'Name an existing schema first, for example: SET search_path = public. Schemas named pg_* are refused.';
  END IF;

  -- Two migrators wait for each other here whatever tool they came with.
  PERFORM pg_advisory_xact_lock(('x' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8'::name)
      || decode('00', 'hex') || convert_to(v_schema, 'UTF8'::name)), 1, 8), 'hex'))::bit(64)::bigint);
  PERFORM set_config('search_path', pg_catalog.format('%I, pg_temp', v_schema), true);

  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'If that role is the one that owns pgxlock, SET ROLE to it and run this again; else drop them.';
  END IF;
  IF to_regclass(pg_catalog.format('%I.pgxlock_epoch', v_schema)) IS NULL THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1', quote_ident(v_schema)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Run 000001_leases.up.sql first.';
  END IF;

  ----------------------------------------------------------- locks and waits --
  -- Until when a wait may last: 50 ms before a timeout that would abort the
  -- transaction, or end the session, instead.
  CREATE OR REPLACE FUNCTION pgxlock_deadline(p_max_wait interval) RETURNS timestamptz
  LANGUAGE sql VOLATILE
  RETURN LEAST(clock_timestamp() + LEAST(GREATEST(p_max_wait, interval '0'), interval '100 years'),
               statement_timestamp() - interval '50 ms' + NULLIF(current_setting('statement_timeout'), '0')::interval,
               transaction_timestamp() - interval '50 ms' + NULLIF(current_setting('transaction_timeout', true), '0')::interval);

  -- The lock_timeout for a wait until then; 0 would be none.
  CREATE OR REPLACE FUNCTION pgxlock_lock_timeout(p_deadline timestamptz) RETURNS text
  LANGUAGE sql VOLATILE
  RETURN GREATEST(1::numeric, LEAST(2147483647::numeric,
           ceil(1000::numeric * extract(epoch FROM p_deadline - clock_timestamp()))))::text;

  -- Raises LK002 if the snapshot of this transaction may hide what the previous
  -- holder of a lock, which was just granted, did. Commits are marked before
  -- locks are released, so that none is missed; a transaction that still runs
  -- has released nothing.
  CREATE OR REPLACE FUNCTION pgxlock_vouch() RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_snapshot pg_snapshot := pg_current_snapshot();
    v_next     bigint := pg_snapshot_xmax(v_snapshot)::text::bigint;
  BEGIN
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
      RETURN;                               -- the next statement takes a new one
    END IF;
    -- A snapshot from before the promotion of a standby does not tell who was running.
    IF NOT (pg_snapshot_xmin(v_snapshot)::text::bigint < v_next AND pg_current_xact_id_if_assigned() IS NULL
            AND NOT EXISTS (SELECT FROM pg_snapshot_xip(v_snapshot)))
       AND NOT EXISTS (SELECT FROM pg_snapshot_xip(v_snapshot) x WHERE pg_xact_status(x) = 'committed') THEN
      LOOP                                  -- those that began after it
        EXIT WHEN pg_xact_status(v_next::text::xid8) = 'committed';
        v_next := v_next + 1::bigint;
      END LOOP;
    END IF;
    RAISE EXCEPTION 'the snapshot of this transaction is older than the lock, and something was committed in between'
      USING ERRCODE = 'LK002', HINT = 'Roll back and begin again, lock in a READ COMMITTED transaction, or pass p_allow_stale_snapshot => true.';
  EXCEPTION WHEN invalid_parameter_value THEN
    NULL;                                   -- that id was given to nobody yet
  END $$;

  CREATE OR REPLACE FUNCTION lock_tx(
    p_name text, p_max_wait interval DEFAULT NULL, p_shared boolean DEFAULT false, p_allow_stale_snapshot boolean DEFAULT false)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_key      bigint;
    v_deadline timestamptz;
    v_timeout  text;
  BEGIN
    PERFORM pgxlock_check('p_name', p_name);
    IF p_shared IS NULL OR p_allow_stale_snapshot IS NULL THEN
      RAISE EXCEPTION 'p_shared and p_allow_stale_snapshot must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF pg_is_in_recovery() THEN
      RAISE EXCEPTION 'a lock on a standby server excludes nobody' USING ERRCODE = 'read_only_sql_transaction',
        HINT = 'Connect to the primary, for example with target_session_attrs=read-write.';
    END IF;
    v_key := advisory_lock_key(p_name);

    IF p_shared AND pg_try_advisory_xact_lock_shared(v_key) OR NOT p_shared AND pg_try_advisory_xact_lock(v_key) THEN
      NULL;
    ELSIF p_max_wait <= interval '0' THEN
      RETURN false;
    ELSIF NOT p_shared AND EXISTS (
        SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1::smallint AND l.pid = pg_backend_pid() AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND (l.classid::bigint << 32) | l.objid::bigint = v_key) THEN
      RAISE EXCEPTION 'this transaction holds "%" shared: waiting for it exclusively would be a deadlock with another one that does the same', p_name
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Lock it exclusively from the start.';
    ELSIF p_max_wait IS NULL THEN
      IF p_shared THEN
        PERFORM pg_advisory_xact_lock_shared(v_key);
      ELSE
        PERFORM pg_advisory_xact_lock(v_key);
      END IF;
    ELSE
      v_deadline := pgxlock_deadline(p_max_wait);
      v_timeout := current_setting('lock_timeout');
      BEGIN
        PERFORM set_config('lock_timeout', pgxlock_lock_timeout(v_deadline), true);
        IF p_shared THEN
          PERFORM pg_advisory_xact_lock_shared(v_key);
        ELSE
          PERFORM pg_advisory_xact_lock(v_key);
        END IF;
        PERFORM set_config('lock_timeout', v_timeout, true);
      EXCEPTION WHEN lock_not_available THEN
        RETURN false;                       -- which also sets lock_timeout back
      END;
    END IF;
    IF NOT p_allow_stale_snapshot THEN
      PERFORM pgxlock_vouch();
    END IF;
    RETURN true;
  END $$;

  ------------------------------------------------------------------ claims --
  -- A row exists from the commit of the transaction that claimed the key until
  -- the claim is purged, or expired and claimed again.
  CREATE TABLE IF NOT EXISTS pgxlock_claims (
    claim_key  varchar(255) COLLATE "C" PRIMARY KEY,
    claimed_at timestamptz  NOT NULL,
    expires_at timestamptz,                 -- NULL: stands until it is purged
    claimed_by xid8         NOT NULL        -- by which transaction
  );
  ALTER TABLE pgxlock_claims SET (vacuum_truncate = off);          -- it would lock out claims
  -- Each row is in one of the two.
  CREATE INDEX IF NOT EXISTS pgxlock_claims_claimed_at ON pgxlock_claims (claimed_at) WHERE expires_at IS NULL;
  CREATE INDEX IF NOT EXISTS pgxlock_claims_expires_at ON pgxlock_claims (expires_at) WHERE expires_at IS NOT NULL;

  -- Waits, as every INSERT of a unique key does, for a transaction that has
  -- claimed the key and not ended. Without p_max_wait no subtransaction is begun:
  -- a transaction may claim any number of keys.
  CREATE OR REPLACE FUNCTION claim_once(p_key text, p_max_wait interval DEFAULT NULL, p_retention interval DEFAULT NULL)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_deadline timestamptz;
    v_timeout  text;
    v_claimed  boolean;
    v_now      timestamptz;
    v_keep     interval;
    r          record;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    IF p_retention <= interval '0' OR p_retention > interval '100 years' THEN
      RAISE EXCEPTION 'p_retention must be more than 0 and at most 100 years, it is %', p_retention USING ERRCODE = 'invalid_parameter_value',
        HINT = 'Leave it out for a claim that stands until it is purged.';
    END IF;
    v_keep := pg_catalog.make_interval(secs => pg_catalog.date_part('epoch'::text, p_retention));      -- as a ttl
    IF p_max_wait IS NOT NULL THEN
      -- In short turns: lock_timeout bounds each wait, and one INSERT waits once
      -- for every claimant that is rolled back before its turn comes. Eight such
      -- waits fit into what is left.
      v_deadline := pgxlock_deadline(p_max_wait);
      v_timeout := current_setting('lock_timeout');
      LOOP
        v_now := clock_timestamp();
        BEGIN
          PERFORM set_config('lock_timeout', pgxlock_lock_timeout(v_now + LEAST((v_deadline - v_now) / 8::double precision, interval '50 ms')), true);
          v_claimed := claim_once(p_key, NULL::interval, p_retention);
          PERFORM set_config('lock_timeout', v_timeout, true);
          RETURN v_claimed;
        EXCEPTION WHEN lock_not_available THEN
          IF clock_timestamp() >= v_deadline THEN
            RETURN NULL;                    -- lock_timeout is back already
          END IF;
        END;
      END LOOP;
    END IF;

    FOR i IN 1..100 LOOP
      SELECT c.claimed_at, c.expires_at, c.claimed_by INTO r FROM pgxlock_claims c WHERE c.claim_key::text = p_key COLLATE "C";
      v_now := clock_timestamp();
      IF NOT FOUND THEN
        INSERT INTO pgxlock_claims (claim_key, claimed_at, expires_at, claimed_by)
        VALUES (p_key, v_now, v_now + v_keep, pg_current_xact_id()) ON CONFLICT DO NOTHING;
      ELSIF r.expires_at <= v_now THEN
        UPDATE pgxlock_claims c SET claimed_at = v_now, expires_at = v_now + v_keep, claimed_by = pg_current_xact_id()
         WHERE c.claim_key::text = p_key COLLATE "C" AND c.expires_at <= v_now;
      ELSE
        -- Ours, if this transaction asks again. Ids of another cluster, in rows
        -- that were restored from it, may look like ours; such rows are older.
        RETURN r.claimed_at >= transaction_timestamp() AND coalesce(r.claimed_by = pg_current_xact_id_if_assigned(), false);
      END IF;
      IF FOUND THEN
        IF clock_timestamp() > v_now + interval '5 ms' THEN        -- it waited, and the row is older than the claim
          v_now := clock_timestamp();
          UPDATE pgxlock_claims c SET claimed_at = v_now, expires_at = v_now + v_keep WHERE c.claim_key::text = p_key COLLATE "C";
        END IF;
        RETURN true;
      END IF;
      -- Somebody has just committed a claim, or purged one: look again.
    END LOOP;
    RAISE EXCEPTION 'the claim "%" cannot be read and cannot be made', p_key USING ERRCODE = 'object_not_in_prerequisite_state',
      HINT = 'Does row-level security on pgxlock_claims hide it?';
  END $$;

  CREATE OR REPLACE FUNCTION purge_claims(p_age interval, p_limit integer DEFAULT 10000)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_now   timestamptz := clock_timestamp();
    v_count bigint;
    v_more  bigint;
  BEGIN
    IF p_age IS NULL OR p_age < interval '0' THEN
      RAISE EXCEPTION 'p_age must be 0 or more' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_limit IS NULL OR p_limit < 1 THEN
      RAISE EXCEPTION 'p_limit must be 1 or more' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    DELETE FROM pgxlock_claims c WHERE c.ctid = ANY (ARRAY(
      SELECT o.ctid FROM pgxlock_claims o WHERE o.expires_at IS NULL AND o.claimed_at <= v_now - LEAST(p_age, interval '1000 years') LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    DELETE FROM pgxlock_claims c WHERE c.ctid = ANY (ARRAY(
      SELECT o.ctid FROM pgxlock_claims o WHERE o.expires_at <= v_now LIMIT p_limit - v_count FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_more = ROW_COUNT;
    RETURN v_count + v_more;
  END $$;

  CREATE OR REPLACE FUNCTION pgxlock_schema_version() RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE RETURN 2::bigint;

  ---------------------------------------------------------------- comments --
  COMMENT ON TABLE pgxlock_claims IS 'pgxlock: keys that a committed transaction has claimed, each for good or until expires_at. Housekeeping never touches them; purge_claims() does.';
  COMMENT ON COLUMN pgxlock_claims.claimed_by IS 'The transaction, on the cluster where it ran.';
  COMMENT ON FUNCTION lock_tx(text, interval, boolean, boolean) IS
    'Locks p_name until this transaction ends: the advisory lock advisory_lock_key(p_name), for which LockTx in Go asks as well. Waits for p_max_wait at most (NULL: until it is granted, 0: not at all), but no longer than statement_timeout and transaction_timeout leave; false if it was not granted, with the transaction and its settings as before. p_shared: several may hold it, none exclusively. Raises LK002 above READ COMMITTED if the snapshot is older than the lock can vouch for.';
  COMMENT ON FUNCTION claim_once(text, interval, interval) IS
    'True for exactly one committed transaction per key, together with what else it writes; false if another one''s claim has committed. Waits for p_max_wait at most (NULL: until it is decided, 0: not at all) for a transaction that has claimed the key and not ended; NULL if it is undecided then. The claim stands until purge_claims(), or for p_retention from the call. Above READ COMMITTED it raises 40001 if the key was claimed since the snapshot, in SERIALIZABLE also because of other keys.';
  COMMENT ON FUNCTION purge_claims(interval, integer) IS
    'Ends claims without a retention that are older than p_age, and those whose retention is over; up to p_limit of them. Returns how many. A claim that has ended can be claimed again.';
  COMMENT ON FUNCTION pgxlock_schema_version() IS 'pgxlock: version of this schema.';
  COMMENT ON FUNCTION pgxlock_deadline(interval) IS 'pgxlock, internal: until when a wait may last.';
  COMMENT ON FUNCTION pgxlock_lock_timeout(timestamptz) IS 'pgxlock, internal: the lock_timeout for a wait until then.';
  COMMENT ON FUNCTION pgxlock_vouch() IS 'pgxlock, internal: raises LK002 if the snapshot is older than a lock that was just granted.';

  -------------------------------------------------------------------- rows --
  EXECUTE v_check INTO v_foreign USING v_schema;
  IF v_foreign IS NOT NULL THEN             -- made in the middle of this
    RAISE EXCEPTION 'pgxlock: schema % has objects of another role: %', quote_ident(v_schema), v_foreign USING ERRCODE = 'insufficient_privilege';
  END IF;
  IF EXISTS (SELECT FROM pgxlock_migrations m WHERE m.version > 2) THEN
    RAISE EXCEPTION 'pgxlock: schema % already has a later version (%)', quote_ident(v_schema),
        (SELECT max(m.version) FROM pgxlock_migrations m)
      USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Nothing is to be done; to go back run the down files in reverse order.';
  END IF;
  DELETE FROM pgxlock_migrations;
  INSERT INTO pgxlock_migrations (version, dirty) VALUES (2, false);
END $migration$;
