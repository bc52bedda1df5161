-- Shared leases, which many holders may hold together while none holds the name exclusively; and
-- semaphores, whose permits are leases.
DO $migration$
DECLARE
  v_path   pg_catalog.text := pg_catalog.current_setting('search_path');
  v_schema pg_catalog.text := pg_catalog.current_schema();
  v_new    pg_catalog.bool;
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
  PERFORM pgxlock_migrate('up'::text, 5, v_path);

  ------------------------------------------------------------------- table --
  -- The holders that share a name are ONE row of distributed_locks, the group, with the reserved
  -- holder *shared and a token of its own; it lasts as long as the longest of them. So
  -- acquire_lock() and all other functions exclude it, and are excluded by it, unchanged. Each
  -- holder is also a row here, a share, with the token of its group; without a group of that token
  -- it has no effect.
  --
  -- A writer of a name's shares has the name's row locked or, where there is none, its guard. A
  -- change of which shares count writes the name's row too, so that no older snapshot can decide
  -- about the group by shares that have changed since (40001).
  v_new := to_regclass(quote_ident(v_schema) || '.distributed_lock_shares') IS NULL;
  CREATE TABLE IF NOT EXISTS distributed_lock_shares (
    lock_name     varchar(255) COLLATE "C",
    holder_id     varchar(255) COLLATE "C",
    fencing_token bigint      NOT NULL,     -- of the group
    acquired_at   timestamptz NOT NULL,
    expires_at    timestamptz NOT NULL,     -- not later than the group's
    metadata      jsonb       NOT NULL,
    PRIMARY KEY (lock_name, holder_id)
  ) USING heap;
  ALTER TABLE distributed_lock_shares SET (fillfactor = 45, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
  COMMENT ON TABLE distributed_lock_shares IS
    'pgxlock: shares of leases. A share counts while it has not expired and distributed_locks has a row of its name with '
    'holder *shared and the same token. Write it only through the functions. Rows: one for each share, from acquire to '
    'release; pgxlock_reap_shares() removes those that expired.';
  COMMENT ON COLUMN distributed_lock_shares.fencing_token IS 'Of the group: all that hold the lock together have the same.';
  COMMENT ON COLUMN distributed_lock_shares.expires_at IS 'Not later than the group''s.';

  -------------------------------------------------------------------- view --
  CREATE OR REPLACE VIEW lock_shares AS
    SELECT s.lock_name,
           CASE WHEN s.expires_at > c.clock AND l.fencing_token IS NOT NULL THEN 'live'
                WHEN s.expires_at > c.clock - interval '1 hour' THEN 'expired'
                ELSE 'abandoned' END AS state,
           s.holder_id,
           s.fencing_token,
           CASE WHEN isfinite(s.acquired_at) THEN c.clock - s.acquired_at END AS held_for,
           CASE WHEN isfinite(s.expires_at) THEN s.expires_at - c.clock END AS remaining,
           s.acquired_at,
           s.expires_at,
           s.metadata
      FROM distributed_lock_shares s
      LEFT JOIN distributed_locks l
        ON l.lock_name::text = s.lock_name::text COLLATE "C"
       AND l.holder_id::text = '*shared' COLLATE "C"
       AND l.fencing_token = s.fencing_token,
           LATERAL (SELECT clock_timestamp() AS clock) c;
  COMMENT ON VIEW lock_shares IS
    'pgxlock: shares of leases, for operators. State live; expired: blocks no caller; abandoned: expired for more than an '
    'hour. The group itself is in lock_leases, with holder *shared.';

  ----------------------------------------------------------------- acquire --
  CREATE OR REPLACE FUNCTION acquire_shared_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_metadata jsonb DEFAULT '{}')
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT CASE WHEN t.acquired THEN true WHEN t.held_by::text <> '*shared' COLLATE "C" THEN false END
              FROM try_acquire_shared_lock(p_lock_name, p_holder_id, pg_catalog.make_interval(secs => p_ttl_seconds),
                                           p_metadata) t);
  END $$;
  COMMENT ON FUNCTION acquire_shared_lock(varchar, varchar, integer, jsonb) IS
    'Shares the lease p_lock_name for p_ttl_seconds unless a holder has it exclusively. True if p_holder_id has a share '
    'now, false if the lease is held exclusively, NULL if another transaction is joining, renewing, leaving or acquiring '
    'it: call again. Never waits. A live share of the same holder is renewed. Takes effect when the calling transaction '
    'commits. Above READ COMMITTED it may raise 40001: call it in a transaction of its own.';

  CREATE OR REPLACE FUNCTION try_acquire_shared_lock(
    p_lock_name varchar, p_holder_id varchar, p_ttl interval DEFAULT '30 seconds', p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT expires_at timestamptz, OUT remaining interval, OUT held_by varchar)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_name     text  := p_lock_name;
    v_me       text  := p_holder_id;
    v_metadata jsonb := coalesce(p_metadata, jsonb '{}');
    v_ttl      interval;
    v_now      timestamptz;
    v_live     boolean;
    v_token    bigint;                      -- of the group
    v_until    timestamptz;
    r          record;
  BEGIN
    v_ttl := pgxlock_check_try(v_name, v_me, p_ttl, v_metadata);

    acquired := false;
    FOR i IN 1..3 LOOP
      SELECT l.holder_id::text AS holder, l.expires_at AS expires INTO r
        FROM distributed_locks l WHERE l.lock_name::text = v_name COLLATE "C";
      v_live := FOUND;
      v_now := clock_timestamp();
      v_live := v_live AND r.expires > v_now;
      held_by := r.holder; expires_at := r.expires; remaining := CASE WHEN isfinite(r.expires) THEN r.expires - v_now END;
      IF v_live AND r.holder IS DISTINCT FROM '*shared' COLLATE "C" THEN
        RETURN;
      END IF;

      v_token := NULL;
      IF v_live THEN                        -- join it; checked again once it is locked
        PERFORM pgxlock_durable(false);
        BEGIN
          SELECT g.token, g.expires INTO v_token, v_until FROM pgxlock_lock_group(v_name, false) g;
          IF v_token IS NULL OR v_until <= clock_timestamp() THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          -- A failover or a crash may have taken back the group's end, and grants behind it with greater tokens.
          fencing_token := (pgxlock_next_tokens(1::bigint))[1];
          IF fencing_token >> 40 <= v_token >> 40 THEN
            fencing_token := v_token;
          END IF;
        EXCEPTION WHEN SQLSTATE 'LK900' THEN
          v_token := NULL;
        END;
      ELSE
        -- Acquired like any lease, under a unique holder id, and made a group before the commit.
        SELECT t.fencing_token INTO v_token
          FROM try_acquire_lock(v_name::varchar, ('shared ' || gen_random_uuid()::text)::varchar, v_ttl, jsonb '{}') t;
        fencing_token := v_token;
        IF v_token IS NOT NULL THEN         -- leftovers of earlier groups
          DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = v_name COLLATE "C";
        END IF;
      END IF;

      IF v_token IS NOT NULL THEN
        v_now := clock_timestamp();
        v_until := v_now + v_ttl;
        -- As for an exclusive lease: a live share of the same holder is renewed, and the default
        -- metadata does not erase what an earlier call stored.
        INSERT INTO distributed_lock_shares AS s (lock_name, holder_id, fencing_token, acquired_at, expires_at, metadata)
        VALUES (v_name, v_me, v_token, v_now, v_until, v_metadata)
        ON CONFLICT ON CONSTRAINT distributed_lock_shares_pkey DO UPDATE
          SET fencing_token = excluded.fencing_token, expires_at = excluded.expires_at,
              acquired_at = CASE WHEN s.expires_at > v_now THEN s.acquired_at ELSE v_now END,
              metadata = CASE WHEN s.expires_at > v_now AND v_metadata = jsonb '{}' THEN s.metadata ELSE v_metadata END;
        -- A share that is shortened may have been the longest.
        UPDATE distributed_locks l SET holder_id = '*shared', expires_at = CASE WHEN v_until >= l.expires_at THEN v_until ELSE (
                 SELECT max(s.expires_at) FROM distributed_lock_shares s
                  WHERE s.lock_name::text = v_name COLLATE "C" AND s.fencing_token = v_token) END
         WHERE l.lock_name::text = v_name COLLATE "C";
        acquired := true; expires_at := v_until; remaining := v_ttl; held_by := v_me;
        RETURN;
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION try_acquire_shared_lock(varchar, varchar, interval, jsonb) IS
    'Like acquire_shared_lock, and returns the fencing token. It is greater than that of any earlier exclusive holder: the '
    'group''s or, if that is from before a failover or a crash, one of its own. If not acquired, held_by, expires_at and '
    'remaining describe the exclusive holder; if held_by is *shared or NULL, call again.';

  CREATE OR REPLACE FUNCTION acquire_shared_in_turn(
    p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30, p_ticket bigint DEFAULT NULL,
    p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT fencing_token bigint, OUT ticket bigint, OUT ask_again_ms integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    SELECT t.tokens IS NOT NULL, t.tokens[1], t.ticket, t.ask_again_ms INTO acquired, fencing_token, ticket, ask_again_ms
      FROM pgxlock_wait_in_turn(p_lock_name::text, p_holder_id::text, p_ttl_seconds, p_ticket, p_metadata, true,
                                NULL::integer, NULL::integer) t;
  END $$;
  COMMENT ON FUNCTION acquire_shared_in_turn(varchar, varchar, integer, bigint, jsonb) IS
    'acquire_in_turn() for a share of the lease. Readers in a row are served together.';

  ------------------------------------------------------------------ extend --
  CREATE OR REPLACE FUNCTION extend_shared_lock(p_lock_name varchar, p_holder_id varchar, p_ttl_seconds integer DEFAULT 30)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off
  SET jit = off AS $$
  DECLARE
    v_name  text := p_lock_name;
    v_me    text := p_holder_id;
    v_ttl   interval;
    v_until timestamptz;
    r       record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    v_ttl := pgxlock_ttl('p_ttl_seconds', pg_catalog.make_interval(secs => p_ttl_seconds));
    PERFORM FROM distributed_lock_shares s, distributed_locks l
      WHERE s.lock_name::text = v_name COLLATE "C"
        AND s.holder_id::text = v_me COLLATE "C"
        AND l.lock_name::text = v_name COLLATE "C"
        AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token AND s.expires_at > clock_timestamp();
    IF NOT FOUND THEN
      RETURN false;
    END IF;
    PERFORM pgxlock_durable(true);
    BEGIN
      SELECT g.token, g.expires INTO r FROM pgxlock_lock_group(v_name, true) g;
      UPDATE distributed_lock_shares s SET expires_at = clock_timestamp() + v_ttl
       WHERE s.lock_name::text = v_name COLLATE "C" AND s.holder_id::text = v_me COLLATE "C" AND s.fencing_token = r.token
         AND s.expires_at > clock_timestamp() AND r.expires > clock_timestamp()
      RETURNING s.expires_at INTO v_until;
      IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      UPDATE distributed_locks l SET expires_at = CASE WHEN v_until >= l.expires_at THEN v_until ELSE (
               SELECT max(s.expires_at) FROM distributed_lock_shares s
                WHERE s.lock_name::text = v_name COLLATE "C" AND s.fencing_token = r.token) END
       WHERE l.lock_name::text = v_name COLLATE "C";
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN false;
    END;
    RETURN true;
  END $$;
  COMMENT ON FUNCTION extend_shared_lock(varchar, varchar, integer) IS
    'Sets the expiry of a share to now + p_ttl_seconds; false if the holder has lost it. Waits for a transaction that is '
    'joining, renewing or leaving: renew several in one order, by name.';

  ----------------------------------------------------------------- release --
  CREATE OR REPLACE FUNCTION release_shared_lock(p_lock_name varchar, p_holder_id varchar)
  RETURNS boolean LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_check('p_lock_name', p_lock_name::text);
    PERFORM pgxlock_check('p_holder_id', p_holder_id::text);
    RETURN pgxlock_release_share(p_lock_name::text, p_holder_id::text, NULL::bigint, true) IN ('released', 'left');
  END $$;
  COMMENT ON FUNCTION release_shared_lock(varchar, varchar) IS
    'Releases a share. True if it was still live; false if it had expired or is not the holder''s. Raises 55P03 for a '
    'live share while a transaction that called assert_shared_lock_held is open, after half a second.';

  CREATE OR REPLACE FUNCTION release_all_locks(p_holder_id varchar)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_me    text := p_holder_id;
    v_name  text;
    v_count bigint := 0;
  BEGIN
    PERFORM pgxlock_check('p_holder_id', v_me);
    FOR v_name IN SELECT l.lock_name::text FROM distributed_locks l
                   WHERE l.holder_id::text = v_me COLLATE "C"
                   ORDER BY l.lock_name::text COLLATE "C" LOOP
      IF pgxlock_release(v_name, v_me, NULL::bigint) THEN
        v_count := v_count + 1::bigint;
      END IF;
    END LOOP;
    IF NOT has_table_privilege('distributed_lock_shares'::regclass::oid, 'SELECT'::text) THEN
      RETURN v_count;                       -- a role that may not read shares has none
    END IF;
    FOR v_name IN SELECT s.lock_name::text FROM distributed_lock_shares s
                   WHERE s.holder_id::text = v_me COLLATE "C"
                   ORDER BY s.lock_name::text COLLATE "C" LOOP
      IF pgxlock_release_share(v_name, v_me, NULL::bigint, true) IN ('released', 'left') THEN
        v_count := v_count + 1::bigint;
      END IF;
    END LOOP;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION release_all_locks(varchar) IS
    'Releases every lease and share of the holder, or none (55P03) while an open transaction has asserted a live one. '
    'Returns how many were still live.';

  -- p_token NULL: any token of the holder's share. A holder that joined after a failover has a token of a
  -- later epoch than its group.
  --   released  it was live and the last one: the name is free
  --   left      it was live, and others stay
  --   expired   it had expired: it is removed if that needs no wait
  --   gone      it was released before, or the group has ended
  --   skipped   without waiting: an open transaction asserted it, or the group is being changed
  CREATE OR REPLACE FUNCTION pgxlock_release_share(p_lock_name text, p_holder_id text, p_token bigint, p_wait boolean)
  RETURNS text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_outcome text := 'gone';
    v_wait    boolean;                      -- for a transaction that is changing the group
    v_now     timestamptz;
    v_live    boolean;
    v_until   timestamptz;
    v_pause   float8 := 0.001;
    r         record;
  BEGIN
    SELECT s.expires_at > clock_timestamp() INTO v_live FROM distributed_lock_shares s, distributed_locks l
     WHERE s.lock_name::text = p_lock_name COLLATE "C"
       AND s.holder_id::text = p_holder_id COLLATE "C"
       AND l.lock_name::text = p_lock_name COLLATE "C"
       AND l.holder_id::text = '*shared' COLLATE "C"
       AND l.fencing_token = s.fencing_token
       AND (p_token IS NULL OR s.fencing_token = p_token OR p_token >> 40 > s.fencing_token >> 40);
    IF NOT FOUND THEN
      RETURN v_outcome;
    END IF;
    PERFORM pgxlock_durable(false);
    v_wait := p_wait AND v_live;
    BEGIN
      -- As in pgxlock_release(): an assert that is about to fail has the pin for a moment.
      WHILE v_wait AND v_pause < 0.3::float8 AND NOT pg_try_advisory_xact_lock(pgxlock_share_pin(p_lock_name, p_holder_id)) LOOP
        PERFORM pg_sleep(v_pause);
        v_pause := v_pause * 2::float8;
      END LOOP;
      SELECT g.token INTO r FROM pgxlock_lock_group(p_lock_name, v_wait) g;
      IF NOT v_wait THEN
        v_outcome := CASE WHEN v_live THEN 'skipped' ELSE 'expired' END;
      END IF;
      IF r.token IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      IF NOT pg_try_advisory_xact_lock(pgxlock_share_pin(p_lock_name, p_holder_id)) THEN
        v_outcome := (SELECT CASE WHEN s.expires_at > clock_timestamp() THEN 'skipped' ELSE 'expired' END
                        FROM distributed_lock_shares s
                       WHERE s.lock_name::text = p_lock_name COLLATE "C"
                         AND s.holder_id::text = p_holder_id COLLATE "C"
                         AND s.fencing_token = r.token);
        v_outcome := coalesce(v_outcome, 'gone');
        IF p_wait AND v_outcome = 'skipped' THEN
          RAISE EXCEPTION 'the share of lock "%" cannot be released now: a transaction that asserted it is still open',
              p_lock_name
            USING ERRCODE = 'lock_not_available',
                  HINT = 'Release after that transaction has ended, or inside it, or leave the share to its expiry.';
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      v_now := clock_timestamp();
      DELETE FROM distributed_lock_shares s
       WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.holder_id::text = p_holder_id COLLATE "C"
         AND s.fencing_token = r.token AND (p_token IS NULL OR r.token = p_token OR p_token >> 40 > r.token >> 40)
      RETURNING s.expires_at > v_now INTO v_live;
      IF NOT FOUND THEN
        v_outcome := 'gone';
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
      -- Holders that stay, and stop renewing, keep others out only until their own shares expire.
      v_until := (SELECT max(s.expires_at) FROM distributed_lock_shares s
                   WHERE s.lock_name::text = p_lock_name COLLATE "C" AND s.fencing_token = r.token AND s.expires_at > v_now);
      IF v_until IS NULL AND pg_try_advisory_xact_lock(pgxlock_key('pin', p_lock_name)) THEN
        DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = p_lock_name COLLATE "C";
        DELETE FROM distributed_locks l WHERE l.lock_name::text = p_lock_name COLLATE "C";
      ELSE
        -- Pinned: a holder that asserted its share and expired is writing under it. The next holder
        -- takes the expired lease over, as always, when that transaction has ended.
        UPDATE distributed_locks l
           SET expires_at = coalesce(v_until, least(l.expires_at, v_now))
         WHERE l.lock_name::text = p_lock_name COLLATE "C";
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      RETURN v_outcome;
    END;
    RETURN CASE WHEN NOT v_live THEN 'expired' WHEN v_until IS NULL THEN 'released' ELSE 'left' END;
  END $$;
  COMMENT ON FUNCTION pgxlock_release_share(text, text, bigint, boolean) IS 'pgxlock, internal: releases a share.';

  ------------------------------------------------------------------- fence --
  -- The pins are acquired first and the rows read in a LATER statement, as in assert_lock_held().
  -- The pin of the name keeps the group from ending, that of the share keeps it from being
  -- released.
  CREATE OR REPLACE FUNCTION assert_shared_lock_held(
    p_lock_name varchar, p_holder_id varchar, p_fencing_token bigint DEFAULT NULL, p_allow_expired boolean DEFAULT false)
  RETURNS bigint LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off
  SET jit = off AS $$
  DECLARE
    v_name text := p_lock_name;
    v_me   text := p_holder_id;
    v_read_committed boolean := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
    v_found boolean;
    v_live  boolean;
    v_timeout text;
    r      record;
  BEGIN
    PERFORM pgxlock_check('p_lock_name', v_name);
    PERFORM pgxlock_check('p_holder_id', v_me);
    IF current_setting('transaction_read_only') = 'on' THEN
      RAISE EXCEPTION 'assert_shared_lock_held() protects writes, and this transaction is read-only'
        USING ERRCODE = 'read_only_sql_transaction',
              HINT = 'Begin a READ WRITE transaction on the primary; or leave the call out, because nothing can be written here.';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(pgxlock_key('pin', v_name))
       OR NOT pg_try_advisory_xact_lock_shared(pgxlock_share_pin(v_name, v_me)) THEN
      RAISE EXCEPTION 'lock "%" is not shared by "%" for this transaction: it is just being taken over or released',
          v_name, v_me
        USING ERRCODE = 'LK001';
    END IF;
    IF v_read_committed THEN
      SELECT s.fencing_token AS token, s.expires_at AS expires INTO r
        FROM distributed_lock_shares s, distributed_locks l
       WHERE s.lock_name::text = v_name COLLATE "C"
         AND s.holder_id::text = v_me COLLATE "C"
         AND l.lock_name::text = v_name COLLATE "C"
         AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token;
      v_found := FOUND;
    ELSE
      -- The row locks make PostgreSQL compare the snapshot with the present rows (40001 if the
      -- group has ended or the share was released since). Joining, renewing and leaving do not
      -- conflict with them.
      v_timeout := current_setting('lock_timeout');
      PERFORM set_config('lock_timeout', '10ms', true);
      SELECT s.fencing_token AS token, s.expires_at AS expires INTO r
        FROM distributed_lock_shares s, distributed_locks l
       WHERE s.lock_name::text = v_name COLLATE "C"
         AND s.holder_id::text = v_me COLLATE "C"
         AND l.lock_name::text = v_name COLLATE "C"
         AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token FOR KEY SHARE SKIP LOCKED;
      v_found := FOUND;
      PERFORM set_config('lock_timeout', v_timeout, true);
      IF NOT v_found THEN
        PERFORM FROM distributed_lock_shares s, distributed_locks l
          WHERE s.lock_name::text = v_name COLLATE "C"
            AND s.holder_id::text = v_me COLLATE "C"
            AND l.lock_name::text = v_name COLLATE "C";
        IF NOT FOUND THEN
          RAISE EXCEPTION 'the share of lock "%" is not visible to this transaction''s snapshot', v_name USING ERRCODE = 'LK002',
            DETAIL = 'The snapshot is older than the acquisition, or the lock was released before it.',
            HINT = 'Acquire first, then begin the transaction, and assert in its first statement.';
        END IF;
      END IF;
    END IF;
    v_found := v_found AND (p_fencing_token IS NULL OR r.token = p_fencing_token OR p_fencing_token >> 40 > r.token >> 40);
    v_live := v_found AND r.expires > clock_timestamp();
    IF v_live OR v_found AND p_allow_expired THEN
      RETURN greatest(r.token, p_fencing_token);
    END IF;
    IF v_found AND NOT v_read_committed THEN
      RAISE EXCEPTION 'the share of lock "%" had expired at %, as far as this transaction''s snapshot shows',
          v_name, r.expires
        USING ERRCODE = 'LK002',
              HINT = 'Later renewals are not visible to it. With p_allow_expired => true an expired share of a lock that was '
                     'not taken over is enough.';
    END IF;
    RAISE EXCEPTION 'lock "%" is not shared by "%"', v_name, v_me USING ERRCODE = 'LK001',
      DETAIL = CASE WHEN v_found THEN 'It expired at ' || r.expires::text || '.'
                    WHEN v_read_committed THEN 'It was released, or never acquired, or that has not committed; or the '
                                               'lock was taken over since.'
                    ELSE 'Its token is another one, or another transaction has a row of it locked.' END;
  END $$;
  COMMENT ON FUNCTION assert_shared_lock_held(varchar, varchar, bigint, boolean) IS
    'assert_lock_held() for a share. Raises LK001 if the holder has lost it and, above READ COMMITTED, LK002 if the '
    'snapshot is older than the acquisition. Until this transaction ends no holder can acquire the lease exclusively; '
    'others may join, renew and leave. Waits for no other function of pgxlock. Rolling back to a savepoint before the '
    'call ends the protection.';

  ----------------------------------------------------------------- batches --
  -- The groups are locked first, in one order and without waiting, and each is written once,
  -- however many of its shares are renewed.
  CREATE OR REPLACE FUNCTION pgxlock_renew_shares_batch(p_names text[], p_holders text[], p_tokens bigint[],
    p_ttls bigint[])
  RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan AS $$
  DECLARE
    v_names   text[];
    v_tokens  bigint[];
    v_renewed bigint[];
  BEGIN
    PERFORM pgxlock_require(greatest(pg_catalog.cardinality(p_names), pg_catalog.cardinality(p_holders),
                                     pg_catalog.cardinality(p_tokens), pg_catalog.cardinality(p_ttls)) <= 1000,
                            'p_names, p_holders, p_tokens and p_ttls must have at most 1000 elements');
    PERFORM pgxlock_durable(true);
    WITH want AS MATERIALIZED (
      SELECT DISTINCT w.name COLLATE "C" AS name FROM pg_catalog.unnest(p_names) AS w (name)
    ), locked AS MATERIALIZED (
      SELECT w.name, l.fencing_token AS token
        FROM want w JOIN distributed_locks l ON l.lock_name::text = w.name
       WHERE l.holder_id::text = '*shared' COLLATE "C" AND l.expires_at > clock_timestamp()
       ORDER BY l.lock_name::text COLLATE "C"
         FOR NO KEY UPDATE OF l SKIP LOCKED
    )
    SELECT pg_catalog.array_agg(k.name), pg_catalog.array_agg(k.token) INTO v_names, v_tokens FROM locked k;

    -- A later statement, to see the shares as they are now.
    WITH due AS MATERIALIZED (
      SELECT w.n, w.name, w.holder, w.ttl::float8 * interval '1 millisecond' AS ttl
        FROM unnest(p_names, p_holders, p_tokens, p_ttls) WITH ORDINALITY AS w (name, holder, token, ttl, n)
        JOIN unnest(v_names, v_tokens) AS g (name, token) ON g.name = w.name COLLATE "C"
        JOIN distributed_lock_shares s ON s.lock_name::text = w.name COLLATE "C" AND s.holder_id::text = w.holder COLLATE "C"
       WHERE s.fencing_token = g.token AND s.expires_at > clock_timestamp()
         AND (g.token = coalesce(w.token, g.token) OR w.token >> 40 > g.token >> 40)
         AND w.ttl BETWEEN 1::bigint AND 3110400000000::bigint
    ), renewed AS (
      UPDATE distributed_lock_shares s SET expires_at = greatest(s.expires_at, clock_timestamp() + d.ttl)
        FROM due d WHERE s.lock_name::text = d.name COLLATE "C" AND s.holder_id::text = d.holder COLLATE "C"
      RETURNING d.name, s.expires_at
    ), latest AS MATERIALIZED (
      SELECT r.name COLLATE "C" AS name, max(r.expires_at) AS until FROM renewed r GROUP BY r.name COLLATE "C"
    ), raised AS (
      UPDATE distributed_locks l SET expires_at = greatest(l.expires_at, t.until) FROM latest t WHERE l.lock_name::text = t.name
    )
    SELECT pg_catalog.array_agg(d.n) INTO v_renewed FROM due d;

    RETURN QUERY
    SELECT CASE WHEN w.n = ANY (v_renewed) THEN 'renewed'
                WHEN EXISTS (SELECT FROM distributed_lock_shares s, distributed_locks l
                              WHERE s.lock_name::text = w.name COLLATE "C"
                                AND s.holder_id::text = w.holder COLLATE "C"
                                AND l.lock_name::text = w.name COLLATE "C"
                                AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token
                                AND (s.fencing_token = coalesce(w.token, s.fencing_token)
                                     OR w.token >> 40 > s.fencing_token >> 40)
                                AND s.expires_at > clock_timestamp() OFFSET 0) THEN 'skipped'
                ELSE 'gone' END
      FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
     ORDER BY w.n;
  END $$;
  COMMENT ON FUNCTION pgxlock_renew_shares_batch(text[], text[], bigint[], bigint[]) IS
    'pgxlock, internal: renews shares. Returns for each entry, in order, renewed, gone (expired, released or taken over) '
    'or skipped (the group is being changed: try again).';

  -- The lease becomes a group with one share, in one transaction. It needs the pin: a transaction that
  -- asserted the lease may write as if it were alone.
  CREATE OR REPLACE FUNCTION pgxlock_share_held(p_name text, p_holder text, p_token bigint, p_sharer text, p_ttl bigint)
  RETURNS text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_ttl   interval := pgxlock_check_try(p_name, p_sharer, p_ttl::float8 * interval '1 millisecond', jsonb '{}');
    v_until timestamptz;
  BEGIN
    PERFORM pgxlock_check('p_holder_id', p_holder);
    PERFORM FROM distributed_lock_shares s, distributed_locks l
      WHERE s.lock_name::text = p_name COLLATE "C" AND s.holder_id::text = p_sharer COLLATE "C" AND s.fencing_token = p_token
        AND l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = p_token
        AND s.expires_at > clock_timestamp();
    IF FOUND THEN
      RETURN 'shared';                      -- by an attempt whose answer was lost
    END IF;
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = p_holder COLLATE "C" AND l.fencing_token = p_token
        AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
      RETURN 'gone';
    END IF;
    PERFORM pgxlock_durable(false);
    IF NOT pg_try_advisory_xact_lock(pgxlock_key('pin', p_name)) THEN
      RETURN 'skipped';
    END IF;
    PERFORM FROM distributed_locks l
      WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = p_holder COLLATE "C" AND l.fencing_token = p_token
        AND l.expires_at > clock_timestamp()
        FOR UPDATE SKIP LOCKED;             -- so that a fence with an older snapshot fails, as after a take-over
    IF NOT FOUND THEN
      RETURN 'skipped';
    END IF;
    DELETE FROM distributed_lock_shares s WHERE s.lock_name::text = p_name COLLATE "C";      -- leftovers of earlier groups
    v_until := clock_timestamp() + v_ttl;
    INSERT INTO distributed_lock_shares (lock_name, holder_id, fencing_token, acquired_at, expires_at, metadata)
    SELECT p_name, p_sharer, p_token, v_until - v_ttl, v_until, l.metadata
      FROM distributed_locks l
     WHERE l.lock_name::text = p_name COLLATE "C";
    UPDATE distributed_locks l SET holder_id = '*shared', expires_at = v_until, metadata = jsonb '{}'
     WHERE l.lock_name::text = p_name COLLATE "C";
    RETURN 'shared';
  END $$;
  COMMENT ON FUNCTION pgxlock_share_held(text, text, bigint, text, bigint) IS
    'pgxlock, internal: makes a lease that p_holder holds exclusively a share of p_sharer, with the same token. Returns shared, '
    'gone (expired, released or taken over) or skipped (a transaction asserted it, or its row is locked: try again). In a '
    'transaction of its own.';

  -- A Locker changes a lease, or a share, by two calls: the first one returns the version of the row, and
  -- the second one names it. Each renewal makes a new version. So a change that arrives late, after one
  -- that its holder has got an answer to, changes nothing: it could make the lease shorter.
  CREATE OR REPLACE FUNCTION pgxlock_change_lease(p_name text, p_holder text, p_token bigint, p_shared boolean, p_version text,
    p_ttl bigint, p_metadata text, OUT outcome text, OUT version text)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_metadata jsonb := p_metadata::jsonb;
    v_ttl      interval := pgxlock_check_try(p_name, p_holder, p_ttl::float8 * interval '1 millisecond',
                                             coalesce(v_metadata, jsonb '{}'));
    v_group    bigint;
    v_until    timestamptz;
  BEGIN
    outcome := 'gone';
    IF p_shared THEN
      SELECT s.xmin::text, l.fencing_token INTO version, v_group FROM distributed_lock_shares s, distributed_locks l
       WHERE s.lock_name::text = p_name COLLATE "C"
         AND s.holder_id::text = p_holder COLLATE "C"
         AND l.lock_name::text = p_name COLLATE "C"
         AND l.holder_id::text = '*shared' COLLATE "C" AND l.fencing_token = s.fencing_token
         AND (s.fencing_token = p_token OR p_token >> 40 > s.fencing_token >> 40) AND s.expires_at > clock_timestamp();
    ELSE
      version := (SELECT l.xmin::text FROM distributed_locks l
                   WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = p_holder COLLATE "C"
                     AND l.fencing_token = p_token AND l.expires_at > clock_timestamp());
    END IF;
    IF version IS NULL THEN
      RETURN;
    END IF;
    outcome := 'skipped';
    IF version IS DISTINCT FROM p_version COLLATE "C" THEN
      RETURN;
    END IF;
    PERFORM pgxlock_durable(true);
    PERFORM FROM distributed_locks l                    -- so that no writer of a share is there either
      WHERE l.lock_name::text = p_name COLLATE "C" AND l.fencing_token = CASE WHEN p_shared THEN v_group ELSE p_token END
        FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    IF p_shared THEN
      UPDATE distributed_lock_shares s SET expires_at = clock_timestamp() + v_ttl, metadata = coalesce(v_metadata, s.metadata)
       WHERE s.lock_name::text = p_name COLLATE "C" AND s.holder_id::text = p_holder COLLATE "C"
         AND s.xmin::text = p_version COLLATE "C" AND s.fencing_token = v_group AND s.expires_at > clock_timestamp()
      RETURNING s.expires_at INTO v_until;
      UPDATE distributed_locks l SET expires_at = CASE WHEN v_until >= l.expires_at THEN v_until ELSE (
               SELECT max(s.expires_at) FROM distributed_lock_shares s
                WHERE s.lock_name::text = p_name COLLATE "C" AND s.fencing_token = v_group) END
       WHERE l.lock_name::text = p_name COLLATE "C" AND v_until IS NOT NULL;
    ELSE
      UPDATE distributed_locks l SET expires_at = clock_timestamp() + v_ttl, metadata = coalesce(v_metadata, l.metadata)
       WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = p_holder COLLATE "C"
         AND l.xmin::text = p_version COLLATE "C" AND l.fencing_token = p_token AND l.expires_at > clock_timestamp();
    END IF;
    IF FOUND THEN
      outcome := 'renewed';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_change_lease(text, text, bigint, boolean, text, bigint, text) IS
    'pgxlock, internal: renews a lease or a share with another ttl, in milliseconds, and other metadata unless that is NULL, '
    'if its row still has p_version. Returns renewed, gone (expired, released or taken over) or skipped (the row has another '
    'version, which is returned, or is locked), and never waits. In a transaction of its own.';

  CREATE OR REPLACE FUNCTION pgxlock_release_shares_batch(p_names text[], p_holders text[], p_tokens bigint[]) RETURNS SETOF text
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  BEGIN
    PERFORM pgxlock_require(greatest(pg_catalog.cardinality(p_names), pg_catalog.cardinality(p_holders),
                                     pg_catalog.cardinality(p_tokens)) <= 1000,
                            'p_names, p_holders and p_tokens must have at most 1000 elements');
    RETURN QUERY
    SELECT pgxlock_release_share(w.name, w.holder, w.token, false)
      FROM unnest(p_names, p_holders, p_tokens) WITH ORDINALITY AS w (name, holder, token, n)
     ORDER BY w.n;
  END $$;
  COMMENT ON FUNCTION pgxlock_release_shares_batch(text[], text[], bigint[]) IS
    'pgxlock, internal: pgxlock_release_share() for each entry, in order, without waiting.';

  CREATE OR REPLACE FUNCTION pgxlock_holders(p_name text)
  RETURNS TABLE (holder text, metadata text, fencing_token bigint, acquired_at timestamptz, expires_at timestamptz,
                 shared boolean)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    r record;
  BEGIN
    FOR r IN SELECT l.holder_id::text AS holder, l.metadata, l.fencing_token, l.acquired_at, l.expires_at
               FROM distributed_locks l
              WHERE l.lock_name::text = p_name COLLATE "C" AND l.expires_at > clock_timestamp() LOOP
      IF r.holder <> '*shared' COLLATE "C" THEN         -- which needs no right on shares
        RETURN QUERY
        SELECT r.holder, coalesce(CASE WHEN jsonb_typeof(r.metadata) = 'string' THEN r.metadata #>> '{}'::text[]
                                       WHEN r.metadata <> jsonb '{}' THEN r.metadata::text END, ''),
               r.fencing_token, r.acquired_at, r.expires_at, false;
      ELSE
        RETURN QUERY
        SELECT s.holder_id::text, coalesce(CASE WHEN jsonb_typeof(s.metadata) = 'string' THEN s.metadata #>> '{}'::text[]
                                                WHEN s.metadata <> jsonb '{}' THEN s.metadata::text END, ''),
               s.fencing_token, s.acquired_at, s.expires_at, true
          FROM distributed_lock_shares s
         WHERE s.lock_name::text = p_name COLLATE "C" AND s.fencing_token = r.fencing_token AND s.expires_at > clock_timestamp();
      END IF;
    END LOOP;
  END $$;
  COMMENT ON FUNCTION pgxlock_holders(text) IS
    'pgxlock, internal: the holders of a live lease, exclusive or shared; metadata that is a JSON string as its text.';

  ------------------------------------------------------------ housekeeping --
  CREATE OR REPLACE FUNCTION pgxlock_reap_shares(p_grace interval DEFAULT '1 hour', p_limit integer DEFAULT 1000) RETURNS bigint
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off AS $$
  DECLARE
    v_before timestamptz;
    v_count  bigint := 0;
    r        record;
  BEGIN
    v_before := pgxlock_before('p_grace', p_grace);
    PERFORM pgxlock_require(p_limit BETWEEN 1 AND 10000, 'p_limit must be between 1 and 10000');
    PERFORM pgxlock_check_read_committed('shares are removed in READ COMMITTED: an older snapshot does not show which '
                                         'groups there are');
    FOR r IN SELECT s.lock_name::text AS name, s.holder_id::text AS holder
               FROM distributed_lock_shares s
              WHERE s.expires_at <= v_before
              LIMIT p_limit LOOP
      BEGIN
        -- Leftovers of a lease that is held exclusively are removed another time.
        PERFORM FROM distributed_locks l
          WHERE l.lock_name::text = r.name COLLATE "C"
            AND (l.holder_id::text = '*shared' COLLATE "C" OR l.expires_at <= clock_timestamp())
            FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          IF NOT pg_try_advisory_xact_lock(pgxlock_key('guard', r.name)) THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
          PERFORM FROM distributed_locks l WHERE l.lock_name::text = r.name COLLATE "C";
          IF FOUND THEN
            RAISE EXCEPTION USING ERRCODE = 'LK900';
          END IF;
        END IF;
        IF NOT pg_try_advisory_xact_lock(pgxlock_share_pin(r.name, r.holder)) THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        PERFORM FROM distributed_lock_shares s
          WHERE s.lock_name::text = r.name COLLATE "C"
            AND s.holder_id::text = r.holder COLLATE "C"
            AND s.expires_at <= v_before
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
          RAISE EXCEPTION USING ERRCODE = 'LK900';
        END IF;
        DELETE FROM distributed_lock_shares s
         WHERE s.lock_name::text = r.name COLLATE "C" AND s.holder_id::text = r.holder COLLATE "C";
        v_count := v_count + 1::bigint;
      EXCEPTION WHEN SQLSTATE 'LK900' THEN
        NULL;                               -- in use, or changed
      END;
    END LOOP;
    RETURN v_count;
  END $$;
  COMMENT ON FUNCTION pgxlock_reap_shares(interval, integer) IS
    'Housekeeping only: removes up to p_limit shares that expired more than p_grace ago; returns how many. Acquiring '
    'never needs it. In a transaction of its own: no share of the same leases can be renewed meanwhile.';

  ----------------------------------------------------------------- helpers --
  -- Call it in a subtransaction that is rolled back if there is nothing to do.
  CREATE OR REPLACE FUNCTION pgxlock_lock_group(p_name text, p_wait boolean, OUT token bigint, OUT expires timestamptz)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_seqscan = off SET jit = off AS $$
  BEGIN
    IF p_wait THEN
      SELECT l.fencing_token, l.expires_at INTO token, expires FROM distributed_locks l
       WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" FOR NO KEY UPDATE;
    ELSE
      SELECT l.fencing_token, l.expires_at INTO token, expires FROM distributed_locks l
       WHERE l.lock_name::text = p_name COLLATE "C" AND l.holder_id::text = '*shared' COLLATE "C" FOR NO KEY UPDATE SKIP LOCKED;
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_lock_group(text, boolean) IS
    'pgxlock, internal: locks the row of a group, which may have expired. NULL: there is none or, without waiting, '
    'another transaction has it locked.';

  -- The length shows where the name ends.
  CREATE OR REPLACE FUNCTION pgxlock_share_pin(p_name text, p_holder text) RETURNS bigint
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN pgxlock_key('share', char_length(p_name)::text || ':' || p_name || p_holder);
  END $$;
  COMMENT ON FUNCTION pgxlock_share_pin(text, text) IS
    'pgxlock, internal: the pin of one share, which its fences hold shared beside the pin of the name.';

  ----------------------------------------------------------------- permits --
  -- A semaphore of n permits is n leases: jobs#1 to jobs#n for jobs. So what is true of leases is
  -- true of permits, and there are never more than n. New is only the search for a free one, and
  -- that waiters for any of them share one queue, jobs#.
  --
  -- From this table callers that use a semaphore with different numbers of permits learn of each
  -- other, and pgxlock_deadlocks() whether one is free.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_semaphores (
    name    text COLLATE "C" NOT NULL,
    permits integer NOT NULL,
    used_at timestamptz NOT NULL,
    used_by text NOT NULL,
    PRIMARY KEY (name, permits)
  ) USING heap;
  CREATE INDEX IF NOT EXISTS pgxlock_semaphores_used_at ON pgxlock_semaphores (used_at);
  COMMENT ON TABLE pgxlock_semaphores IS
    'pgxlock: with how many permits callers use a semaphore. It grants nothing. Rows: one for each semaphore and number '
    'of permits; acquiring a permit removes those that were not used for a day.';
  COMMENT ON COLUMN pgxlock_semaphores.name IS 'The semaphore: its permits are the leases name#1, name#2 and so on.';
  COMMENT ON COLUMN pgxlock_semaphores.permits IS 'The number of permits that a caller gave.';
  COMMENT ON COLUMN pgxlock_semaphores.used_at IS 'When a caller last gave it, to within 20 seconds.';
  COMMENT ON COLUMN pgxlock_semaphores.used_by IS 'The holder id of that caller.';

  CREATE OR REPLACE FUNCTION acquire_permit(
    p_lock_name varchar, p_holder_id varchar, p_permits integer, p_ttl_seconds integer DEFAULT 30,
    p_metadata jsonb DEFAULT '{}') RETURNS varchar
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
  DECLARE
    v_permit integer;
  BEGIN
    PERFORM pgxlock_check_semaphore(p_lock_name::text, p_permits);
    PERFORM pgxlock_require(char_length(p_holder_id::text) BETWEEN 1 AND 255 AND left(p_holder_id::text, 1) <> '*',
                            'p_holder_id must have 1 to 255 characters, and not begin with *');
    PERFORM pgxlock_require(p_ttl_seconds >= 1, 'p_ttl_seconds must be at least 1');
    PERFORM pgxlock_require(octet_length(p_metadata::text) <= 65536, 'p_metadata must not be NULL, nor have more than 64 KiB');
    v_permit := (SELECT t.permit FROM pgxlock_permit_batch(ARRAY[p_lock_name::text], ARRAY[p_permits], ARRAY[p_holder_id::text],
                   ARRAY[p_ttl_seconds::bigint * 1000::bigint], ARRAY[p_metadata::text], ARRAY[NULL]::bigint[]) t);
    RETURN p_lock_name::text || '#' || v_permit::text;
  END $$;
  COMMENT ON FUNCTION acquire_permit(varchar, varchar, integer, integer, jsonb) IS
    'Acquires a permit of a semaphore, one of the leases p_lock_name#1 to p_lock_name#p_permits; returns the name of that '
    'lease, NULL if none is free. Extend it with extend_lock(), release it with release_lock(), protect writes with '
    'assert_lock_held(). Each call acquires another permit.';

  CREATE OR REPLACE FUNCTION acquire_permits_in_turn(
    p_lock_name varchar, p_holder_id varchar, p_permits integer, p_wanted integer DEFAULT 1,
    p_ttl_seconds integer DEFAULT 30, p_ticket bigint DEFAULT NULL, p_metadata jsonb DEFAULT '{}',
    OUT acquired boolean, OUT permits varchar[], OUT fencing_tokens bigint[], OUT ticket bigint, OUT ask_again_ms integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_check_semaphore(p_lock_name::text, p_permits);
    PERFORM pgxlock_require(p_wanted BETWEEN 1 AND p_permits AND p_wanted <= 256,
                            'p_wanted must be between 1 and p_permits, and at most 256');
    SELECT t.tokens IS NOT NULL, t.permits, t.tokens, t.ticket, t.ask_again_ms
      INTO acquired, permits, fencing_tokens, ticket, ask_again_ms
      FROM pgxlock_wait_in_turn(p_lock_name::text, p_holder_id::text, p_ttl_seconds, p_ticket, p_metadata, false,
                                p_permits, p_wanted) t;
  END $$;
  COMMENT ON FUNCTION acquire_permits_in_turn(varchar, varchar, integer, integer, integer, bigint, jsonb) IS
    'acquire_in_turn() for permits of a semaphore, all or none. Returns the names of their leases. A holder that has permits '
    'finds them again, and must want as many. READ COMMITTED only.';

  CREATE OR REPLACE FUNCTION pgxlock_check_semaphore(p_name text, p_permits integer) RETURNS void
  LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
  BEGIN
    PERFORM pgxlock_require(p_permits BETWEEN 1 AND 10000, 'p_permits must be between 1 and 10000');
    IF (char_length(p_name) BETWEEN 1 AND 254 - char_length(p_permits::text)) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_lock_name must have 1 to % characters, which leaves room for # and the number of a permit',
          254 - char_length(p_permits::text)
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_check_semaphore(text, integer) IS
    'pgxlock, internal: checks the name and the permits of a semaphore.';

  CREATE OR REPLACE FUNCTION pgxlock_permit_batch(p_names text[], p_permits integer[], p_holders text[], p_ttls bigint[],
    p_metadata text[], p_tickets bigint[], p_wanted integer[] DEFAULT NULL)
  RETURNS TABLE (acquired boolean, fencing_token bigint, held_by text, remaining_ms bigint, ahead boolean, permit integer,
                 others integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_indexscan = on SET enable_bitmapscan = off AS $$
  DECLARE
    v_count    integer := pg_catalog.cardinality(p_names);
    v_dims     text := CASE WHEN v_count > 0 THEN pg_catalog.format('[1:%s]', v_count) END;
    v_queues   text[] := '{}'::text[];
    v_acquired boolean[] := '{}'::boolean[];
    v_walked   bigint[] := '{}'::bigint[];
    v_below    bigint;
    v_first    bigint;
    v_wanted   integer;
    v_tried    integer[];                   -- permits that other callers were acquiring
    v_found    integer[];
    v_names    text[];                      -- of the leases of these
    v_holder   text;
    v_tokens   bigint[];
    v_now      timestamptz;
  BEGIN
    PERFORM pgxlock_require(v_count <= 1000
                            AND pg_catalog.array_dims(p_names) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_permits) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_holders) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_ttls) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_metadata) IS NOT DISTINCT FROM v_dims
                            AND pg_catalog.array_dims(p_tickets) IS NOT DISTINCT FROM v_dims,
                            'p_names must have at most 1000 elements, and every name needs permits, a holder, a ttl, '
                            'metadata and a ticket');
    PERFORM pgxlock_require(p_wanted IS NULL
                            OR pg_catalog.array_dims(p_wanted) IS NOT DISTINCT FROM v_dims
                               AND (SELECT bool_and(w.wanted BETWEEN 1 AND w.permits) AND sum(w.wanted) <= 1000::bigint
                                      FROM unnest(p_wanted, p_permits) w (wanted, permits)),
                            'p_wanted must be 1 to the number of permits for every name, and at most 1000 in all');
    IF EXISTS (SELECT FROM unnest(p_names, p_permits) AS w (name, permits)
                WHERE (w.permits BETWEEN 1 AND 10000
                       AND char_length(w.name) BETWEEN 1 AND 254 - char_length(w.permits::text)) IS NOT TRUE) THEN
      RAISE EXCEPTION 'a semaphore has 1 to 10000 permits, and a name that leaves room for # and the number of a permit '
                      'in 255 characters'
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pgxlock_check_primary('cannot acquire a permit on a standby server');
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
       AND EXISTS (SELECT FROM pg_catalog.unnest(p_tickets) t (ticket) WHERE t.ticket IS NOT NULL) THEN
      RAISE EXCEPTION 'permits are acquired in turn in READ COMMITTED: an older snapshot does not show the waiters'
        USING ERRCODE = 'active_sql_transaction';
    END IF;

    FOR i IN 1..v_count LOOP
      PERFORM pgxlock_check('p_holder_id', p_holders[i]);
      v_queues := pg_catalog.array_append(v_queues, p_names[i] || '#');
      v_below := CASE WHEN p_tickets[i] = 0::bigint THEN 9223372036854775807 ELSE p_tickets[i] END;
      v_first := CASE WHEN v_below IS NOT NULL THEN pgxlock_first_ahead(0, v_queues[i], v_below) END;
      acquired := false; fencing_token := NULL; held_by := NULL; remaining_ms := NULL; permit := NULL;
      ahead := v_first IS NOT NULL;
      v_wanted := coalesce(p_wanted[i], 1);
      v_tried := '{}'; v_found := NULL; v_tokens := NULL;
      FOR attempt IN 1..4 LOOP                -- after a lost race it tries others
        EXIT WHEN ahead;
        v_now := clock_timestamp();
        -- From a random start, so that simultaneous callers do not all try the same ones.
        v_found := ARRAY(SELECT s.at % p_permits[i] + 1
                     FROM (SELECT pg_catalog.floor(pg_catalog.random() * p_permits[i]::float8)::integer AS start OFFSET 0) f,
                          LATERAL generate_series(f.start, f.start + p_permits[i] - 1) s (at)
                    WHERE s.at % p_permits[i] + 1 <> ALL (v_tried)
                      AND NOT EXISTS (SELECT FROM distributed_locks l
                                       WHERE l.lock_name::text = (v_queues[i] || (s.at % p_permits[i] + 1)::text) COLLATE "C"
                                         AND l.expires_at > v_now OFFSET 0)
                    LIMIT v_wanted);
        EXIT WHEN pg_catalog.cardinality(v_found) < v_wanted;
        v_names := ARRAY(SELECT v_queues[i] || f.permit::text
                           FROM pg_catalog.unnest(v_found) WITH ORDINALITY f (permit, n) ORDER BY f.n);
        -- Under a unique holder id until the commit: another call for the same holder may have
        -- acquired this permit since it was read, and would be renewed.
        v_holder := 'permit ' || gen_random_uuid()::text;
        SELECT bool_and(t.acquired), pg_catalog.array_agg(t.fencing_token ORDER BY t.n),
               pg_catalog.array_cat(v_tried, pg_catalog.array_agg(v_found[t.n] ORDER BY t.n) FILTER (WHERE NOT t.acquired))
          INTO acquired, v_tokens, v_tried
          FROM pgxlock_acquire_each(v_names, pg_catalog.array_fill(v_holder, ARRAY[v_wanted]),
                                    pg_catalog.array_fill(p_ttls[i], ARRAY[v_wanted]),
                                    pg_catalog.array_fill(p_metadata[i], ARRAY[v_wanted]))
                 WITH ORDINALITY AS t (acquired, fencing_token, held_by, remaining_ms, n);
        FOR j IN 1..v_wanted LOOP           -- one by one: a join could read the whole table
          IF acquired THEN
            UPDATE distributed_locks l SET holder_id = p_holders[i] WHERE l.lock_name::text = v_names[j] COLLATE "C";
          ELSIF v_tokens[j] IS NOT NULL THEN
            DELETE FROM distributed_locks l
             WHERE l.lock_name::text = v_names[j] COLLATE "C" AND l.holder_id::text = v_holder COLLATE "C";
          END IF;
        END LOOP;
        EXIT WHEN acquired;
      END LOOP;
      v_acquired := pg_catalog.array_append(v_acquired, acquired);
      v_walked := pg_catalog.array_append(v_walked, coalesce(v_first, v_below, 0::bigint));

      IF NOT acquired THEN                  -- the holder whose lease ends first unless renewed
        v_found := NULL; v_tokens := NULL;
        v_now := clock_timestamp();
        SELECT l.holder,
               CASE WHEN isfinite(l.expires) THEN (date_part('epoch'::text, l.expires - v_now) * 1000::float8)::bigint END
          INTO held_by, remaining_ms
          FROM generate_series(1, p_permits[i]) s (at),           -- one by one: a join could read the whole table
               LATERAL (SELECT l.holder_id::text AS holder, l.expires_at AS expires FROM distributed_locks l
                         WHERE l.lock_name::text = (v_queues[i] || s.at::text) COLLATE "C" OFFSET 0) l
         WHERE l.expires > v_now ORDER BY l.expires LIMIT 1;
      END IF;
      others := (SELECT max(s.permits) FROM pgxlock_semaphores s
                  WHERE s.name = p_names[i] COLLATE "C"
                    AND s.permits <> p_permits[i]
                    AND s.used_at > clock_timestamp() - interval '1 minute');
      IF NOT EXISTS (SELECT FROM pgxlock_semaphores s
                      WHERE s.name = p_names[i] COLLATE "C"
                        AND s.permits = p_permits[i]
                        AND s.used_at > clock_timestamp() - interval '20 seconds')
         AND pg_try_advisory_xact_lock(pgxlock_key('semaphore', p_names[i])) THEN        -- no writer waits for another
        INSERT INTO pgxlock_semaphores AS s (name, permits, used_at, used_by)
        VALUES (p_names[i], p_permits[i], clock_timestamp(), coalesce(p_holders[i], ''))
        ON CONFLICT ON CONSTRAINT pgxlock_semaphores_pkey DO UPDATE SET used_at = excluded.used_at, used_by = excluded.used_by;
        IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
          -- Removes old rows of any semaphore, because a name may be used only once.
          v_now := clock_timestamp() - interval '1 day';
          DELETE FROM pgxlock_semaphores s
           USING (SELECT o.name, o.permits FROM pgxlock_semaphores o WHERE o.used_at < v_now ORDER BY o.used_at LIMIT 4) o
           WHERE s.name = o.name
             AND s.permits = o.permits
             AND s.used_at < v_now
             AND pg_try_advisory_xact_lock(pgxlock_key('semaphore', s.name));
        END IF;
      END IF;
      FOR j IN 1..v_wanted LOOP
        fencing_token := v_tokens[j]; permit := v_found[j];
        RETURN NEXT;
      END LOOP;
    END LOOP;
    IF EXISTS (SELECT FROM pg_catalog.unnest(p_tickets) t (ticket) WHERE t.ticket IS NOT NULL) THEN
      PERFORM pgxlock_settle_tickets(v_queues, p_tickets, v_acquired, v_walked);
    END IF;
  END $$;
  COMMENT ON FUNCTION pgxlock_permit_batch(text[], integer[], text[], bigint[], text[], bigint[], integer[]) IS
    'pgxlock, internal: acquires a permit of each semaphore in turn, or p_wanted permits together or none, a row for each; '
    'tickets as in pgxlock_acquire_batch(), in the queue name#. permit: its number. others: the '
    'highest other number of permits that callers gave within a minute.';

  PERFORM pgxlock_migrate('made'::text, 5, v_path);
  IF v_new THEN
    -- Groups that a forced down file left expire on their own. A holder that joined one
    -- would be taken for all of it, as nobody knows any more who else is in it.
    UPDATE distributed_locks l SET holder_id = '*shared before' WHERE l.holder_id::text = '*shared' COLLATE "C";
  END IF;
END $migration$;
