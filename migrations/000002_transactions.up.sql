-- Locks inside the caller's transaction, for callers in any language: lock_tx() acquires an
-- advisory lock with a bounded wait, claim_once() grants a key to exactly one committed
-- transaction, claim_request() and answer_request() keep an answer with it, purge_claims()
-- removes old claims.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);       -- until the schema is known
  IF NOT EXISTS (SELECT FROM pg_proc p
                  WHERE p.oid = to_regprocedure(quote_ident(v_schema) || '.pgxlock_migrate(text, integer, text)')::oid
                                         AND pg_get_userbyid(p.proowner) = current_user) THEN
    RAISE EXCEPTION 'pgxlock: schema % does not have version 1, or it belongs to another role',
        coalesce(quote_ident(v_schema), 'none')
      USING ERRCODE = 'insufficient_privilege',
            HINT = 'Name the schema first in search_path, SET ROLE to the owner, and run the files in order.';
  END IF;
  PERFORM set_config('search_path', format('%I, pg_temp', v_schema), true);
  PERFORM pgxlock_migrate('up'::text, 2, v_path);

  -------------------------------------------------------------------- lock --
  CREATE OR REPLACE FUNCTION lock_tx(
    p_name text, p_max_wait interval DEFAULT NULL, p_shared boolean DEFAULT false, p_allow_stale_snapshot boolean DEFAULT false)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_key      bigint;
    v_deadline timestamptz;
    v_timeout  text;
  BEGIN
    PERFORM pgxlock_check('p_name', p_name);
    PERFORM pgxlock_require(p_shared IS NOT NULL AND p_allow_stale_snapshot IS NOT NULL,
                            'p_shared and p_allow_stale_snapshot must not be NULL');
    PERFORM pgxlock_check_primary('a lock on a standby server excludes nobody');
    v_key := advisory_lock_key(p_name);

    IF p_shared AND pg_try_advisory_xact_lock_shared(v_key) OR NOT p_shared AND pg_try_advisory_xact_lock(v_key) THEN
      NULL;
    ELSIF p_max_wait <= interval '0' THEN
      RETURN false;
    ELSIF NOT p_shared AND EXISTS (
        SELECT FROM pg_locks l
         WHERE l.locktype = 'advisory' AND l.objsubid = 1::smallint AND l.pid = pg_backend_pid() AND l.granted
           AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
           AND (l.classid::bigint << 32) | l.objid::bigint = v_key) THEN
      RAISE EXCEPTION 'this transaction holds "%" shared: waiting for it exclusively would be a deadlock with another one '
                      'that does the same',
          p_name
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
        RETURN false;                       -- the rollback also restores lock_timeout
      END;
    END IF;
    IF p_allow_stale_snapshot OR current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
      RETURN true;                          -- the next statement takes a new snapshot
    END IF;
    -- The snapshot may hide what the previous holder did. PostgreSQL marks a commit before it releases
    -- the transaction's locks, so no commit of an earlier holder is missed; a transaction that still
    -- runs has released nothing.
    DECLARE
      v_snapshot pg_snapshot := pg_current_snapshot();
      v_next     bigint := pg_snapshot_xmax(v_snapshot)::text::bigint;
    BEGIN
      -- A snapshot from before the promotion of a standby does not show which transactions ran.
      IF NOT (pg_snapshot_xmin(v_snapshot)::text::bigint < v_next AND pg_current_xact_id_if_assigned() IS NULL
              AND NOT EXISTS (SELECT FROM pg_snapshot_xip(v_snapshot)))
         AND NOT EXISTS (SELECT FROM pg_snapshot_xip(v_snapshot) x WHERE pg_xact_status(x) = 'committed') THEN
        LOOP                                -- transactions that began after the snapshot
          EXIT WHEN pg_xact_status(v_next::text::xid8) = 'committed';
          v_next := v_next + 1::bigint;
        END LOOP;
      END IF;
      RAISE EXCEPTION 'the snapshot of this transaction is older than the lock, and something was committed in between'
        USING ERRCODE = 'LK002',
              HINT = 'Roll back and begin again, lock in a READ COMMITTED transaction, or pass p_allow_stale_snapshot => true.';
    EXCEPTION WHEN invalid_parameter_value THEN
      RETURN true;                          -- that id is not assigned yet
    END;
  END $$;
  COMMENT ON FUNCTION lock_tx(text, interval, boolean, boolean) IS
    'Acquires the advisory lock advisory_lock_key(p_name), the same as LockTx in Go, until this transaction ends. Waits '
    'for at most p_max_wait (NULL: until it is granted, 0: not at all), and no longer than statement_timeout and '
    'transaction_timeout allow. False if it was not granted; the transaction and its settings are then as before. '
    'p_shared: several transactions may hold it shared, none exclusively. Above READ COMMITTED raises LK002 if something '
    'was committed between the snapshot and the grant.';

  -- A wait ends 50 ms before a timeout would abort the transaction or end the session.
  CREATE OR REPLACE FUNCTION pgxlock_deadline(p_max_wait interval) RETURNS timestamptz
  LANGUAGE sql VOLATILE
  RETURN LEAST(clock_timestamp() + LEAST(GREATEST(p_max_wait, interval '0'), interval '100 years'),
               statement_timestamp() - interval '50 ms' + NULLIF(current_setting('statement_timeout'), '0')::interval,
               transaction_timestamp() - interval '50 ms' + NULLIF(current_setting('transaction_timeout', true), '0')::interval);
  COMMENT ON FUNCTION pgxlock_deadline(interval) IS 'pgxlock, internal: when a wait must end.';

  -- At least 1, because a lock_timeout of 0 is none.
  CREATE OR REPLACE FUNCTION pgxlock_lock_timeout(p_deadline timestamptz) RETURNS text
  LANGUAGE sql VOLATILE
  RETURN GREATEST(1::numeric, LEAST(2147483647::numeric,
           ceil(1000::numeric * extract(epoch FROM p_deadline - clock_timestamp()))))::text;
  COMMENT ON FUNCTION pgxlock_lock_timeout(timestamptz) IS 'pgxlock, internal: the lock_timeout for a wait until p_deadline.';

  ------------------------------------------------------------------ claims --
  -- A row exists from the commit of the claiming transaction until the claim is purged, or expires
  -- and is claimed again.
  CREATE TABLE IF NOT EXISTS pgxlock_claims (
    claim_key  varchar(255) COLLATE "C" PRIMARY KEY,
    claimed_at timestamptz  NOT NULL,
    expires_at timestamptz,                 -- NULL: lasts until it is purged
    claimed_by xid8         NOT NULL,       -- the transaction
    fingerprint varchar(255) COLLATE "C",   -- of the request that was answered; NULL: no answer
    answer      bytea
  ) USING heap;
  ALTER TABLE pgxlock_claims SET (vacuum_truncate = off, toast.vacuum_truncate = off);       -- truncating would block claims
  -- Each row is in one of these two indexes.
  CREATE INDEX IF NOT EXISTS pgxlock_claims_claimed_at ON pgxlock_claims (claimed_at) WHERE expires_at IS NULL;
  CREATE INDEX IF NOT EXISTS pgxlock_claims_expires_at ON pgxlock_claims (expires_at) WHERE expires_at IS NOT NULL;
  COMMENT ON TABLE pgxlock_claims IS
    'pgxlock: keys that committed transactions have claimed, for good or until expires_at. Rows: one for each claim; only '
    'purge_claims() removes them.';
  COMMENT ON COLUMN pgxlock_claims.claimed_by IS 'The transaction, on the cluster where it ran.';

  -- It waits, as every INSERT of a unique key does, for an open transaction that has claimed the
  -- key. Without p_max_wait it begins no subtransaction, so a transaction may claim any number of
  -- keys.
  CREATE OR REPLACE FUNCTION claim_once(p_key text, p_max_wait interval DEFAULT NULL, p_retention interval DEFAULT NULL)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off
  SET jit = off AS $$
  DECLARE
    v_deadline timestamptz;
    v_timeout  text;
    v_claimed  boolean;
    v_now      timestamptz;
    v_keep     interval;
    r          record;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    IF p_retention IS NOT NULL THEN         -- else the claim lasts until it is purged
      v_keep := pgxlock_ttl('p_retention', p_retention);
    END IF;
    IF p_max_wait IS NOT NULL THEN
      -- Many short waits: lock_timeout bounds each wait, but one INSERT waits once for every
      -- earlier claimant that rolls back. Eight such waits fit into the remaining time.
      v_deadline := pgxlock_deadline(p_max_wait);
      v_timeout := current_setting('lock_timeout');
      LOOP
        v_now := clock_timestamp();
        BEGIN
          PERFORM set_config('lock_timeout',
                             pgxlock_lock_timeout(
                               v_now + LEAST((v_deadline - v_now) / 8::double precision, interval '50 ms')), true);
          v_claimed := claim_once(p_key, NULL::interval, p_retention);
          PERFORM set_config('lock_timeout', v_timeout, true);
          RETURN v_claimed;
        EXCEPTION WHEN lock_not_available THEN
          IF clock_timestamp() >= v_deadline THEN
            RETURN NULL;                    -- lock_timeout is restored already
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
        UPDATE pgxlock_claims c
           SET claimed_at = v_now, expires_at = v_now + v_keep, claimed_by = pg_current_xact_id(),
               fingerprint = NULL, answer = NULL
         WHERE c.claim_key::text = p_key COLLATE "C" AND c.expires_at <= v_now;
      ELSE
        -- True if this transaction calls again. Rows that were restored from another cluster may
        -- have the same transaction id, but they are older.
        RETURN r.claimed_at >= transaction_timestamp() AND coalesce(r.claimed_by = pg_current_xact_id_if_assigned(), false);
      END IF;
      IF FOUND THEN
        IF clock_timestamp() > v_now + interval '5 ms' THEN        -- after a wait the times are too early
          v_now := clock_timestamp();
          UPDATE pgxlock_claims c SET claimed_at = v_now, expires_at = v_now + v_keep WHERE c.claim_key::text = p_key COLLATE "C";
        END IF;
        RETURN true;
      END IF;
      -- Another transaction has just committed or purged a claim: read again.
    END LOOP;
    RAISE EXCEPTION 'the claim "%" cannot be read and cannot be made', p_key USING ERRCODE = 'object_not_in_prerequisite_state',
      HINT = 'Does row-level security on pgxlock_claims hide it?';
  END $$;
  COMMENT ON FUNCTION claim_once(text, interval, interval) IS
    'True for one committed transaction per key, together with its other writes; false if another transaction''s '
    'claim has committed. Waits for at most p_max_wait (NULL: until it is decided, 0: 1 ms) for an open transaction that '
    'has claimed the key; NULL if that is still open then. The claim lasts until purge_claims(), or for p_retention from '
    'the call. Above READ COMMITTED raises 40001 if the key was claimed since the snapshot, in SERIALIZABLE also because '
    'of other keys.';

  -- The fingerprint is stored with the answer and not with the claim: before the commit no other
  -- transaction sees either, and so each request writes two versions of its row, not three.
  CREATE OR REPLACE FUNCTION claim_request(
    p_key text, p_fingerprint text, p_max_wait interval DEFAULT NULL, p_retention interval DEFAULT NULL,
    OUT outcome text, OUT answer bytea)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_first boolean;
    r       record;
  BEGIN
    PERFORM pgxlock_check('p_fingerprint', p_fingerprint);
    LOOP
      v_first := claim_once(p_key, p_max_wait, coalesce(p_retention, interval '100 years'));
      IF v_first IS NULL THEN
        outcome := 'pending';
        RETURN;
      END IF;
      SELECT c.fingerprint IS NULL AS unanswered,
             CASE WHEN c.fingerprint::text = p_fingerprint COLLATE "C" THEN coalesce(c.answer, '') END AS answer
        INTO r FROM pgxlock_claims c WHERE c.claim_key::text = p_key COLLATE "C";
      IF FOUND THEN                         -- else it was purged since it was read
        outcome := CASE WHEN r.answer IS NOT NULL THEN 'answered'
                        WHEN v_first AND r.unanswered THEN 'first'
                        ELSE 'other' END;
        answer := r.answer;
        RETURN;
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION claim_request(text, text, interval, interval) IS
    'Claims a request, or returns its answer. Waits and lasts as a claim of claim_once(). outcome is ''first'': do the '
    'work, call answer_request() and commit; ''answered'', by this transaction or one that has committed; ''other'': the '
    'key was claimed with another p_fingerprint or without an answer; ''pending'': not decided within p_max_wait. '
    'p_retention: NULL is 100 years, so that no purge removes an answer that nobody said would end.';

  CREATE OR REPLACE FUNCTION answer_request(p_key text, p_fingerprint text, p_answer bytea) RETURNS void
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    PERFORM pgxlock_check('p_key', p_key);
    PERFORM pgxlock_check('p_fingerprint', p_fingerprint);
    PERFORM pgxlock_require(octet_length(p_answer) <= 1048576, 'p_answer must not be NULL, nor have more than 1 MiB');
    UPDATE pgxlock_claims c SET fingerprint = p_fingerprint, answer = p_answer
     WHERE c.claim_key::text = p_key COLLATE "C" AND c.fingerprint IS NULL
       AND c.claimed_at >= transaction_timestamp() AND c.claimed_by = pg_current_xact_id_if_assigned();
    IF NOT FOUND THEN
      RAISE EXCEPTION 'this transaction has not claimed "%", or has answered it', p_key
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Call claim_request() before, in the same transaction: with autocommit each statement is one.';
    END IF;
  END $$;
  COMMENT ON FUNCTION answer_request(text, text, bytea) IS
    'Stores the answer to a request that this transaction has claimed. Callers of claim_request() with the same key and '
    'fingerprint receive it. At most 1 MiB. Raises 55000 if the transaction has not claimed it, or has answered it.';

  CREATE OR REPLACE FUNCTION purge_claims(p_age interval, p_limit integer DEFAULT 10000)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off
  SET jit = off AS $$
  DECLARE
    v_now    timestamptz := clock_timestamp();
    v_before timestamptz;
    v_count  bigint;
    v_more   bigint;
  BEGIN
    v_before := pgxlock_before('p_age', p_age);
    PERFORM pgxlock_require(p_limit >= 1, 'p_limit must be 1 or more');
    DELETE FROM pgxlock_claims c WHERE c.ctid = ANY (ARRAY(
      SELECT o.ctid FROM pgxlock_claims o
       WHERE o.expires_at IS NULL AND o.claimed_at <= v_before
       LIMIT p_limit
         FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    DELETE FROM pgxlock_claims c WHERE c.ctid = ANY (ARRAY(
      SELECT o.ctid FROM pgxlock_claims o WHERE o.expires_at <= v_now LIMIT p_limit - v_count FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_more = ROW_COUNT;
    RETURN v_count + v_more;
  END $$;
  COMMENT ON FUNCTION purge_claims(interval, integer) IS
    'Removes up to p_limit claims whose retention is over, or that have none and are older than p_age. Returns how many. '
    'Their keys can be claimed again.';

  PERFORM pgxlock_migrate('made'::text, 2, v_path);
END $migration$;
