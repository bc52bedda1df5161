-- Rate limits: one number per key says how much of its limit is used. allow_rate() and
-- reserve_rate() are for callers in SQL, pgxlock_limit_batch() for Limiters.
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
  PERFORM pgxlock_migrate('up'::text, 7, v_path);

  ------------------------------------------------------------------- table --
  -- tat is the "theoretical arrival time" of GCRA: when a key's bucket is full again if nothing
  -- more is taken. Taking n events moves it by n times the time of one event, from now if it has
  -- passed, and is allowed if it is then no further ahead than a full bucket. A row whose tat has
  -- passed says the same as no row.
  --
  -- Nanoseconds since 1970, because at a million events a second one takes as long as a timestamp's
  -- resolution; integers, because their sums are exact: n calls for one event and one call for n
  -- events come to the same. Only the time of one event is rounded, by half a nanosecond in at
  -- least a thousand. bigint has room until 2262.
  --
  -- Unlogged, so that no decision waits for a disk: a crash empties all buckets' debts, so that
  -- each gives at most one burst too many. Only tat changes, and no index has it, so an update
  -- stays on its page.
  CREATE UNLOGGED TABLE IF NOT EXISTS pgxlock_limits (
    limit_key text COLLATE "C" PRIMARY KEY,
    tat       bigint NOT NULL
  ) USING heap;
  ALTER TABLE pgxlock_limits SET (fillfactor = 50, vacuum_truncate = off,
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
  COMMENT ON TABLE pgxlock_limits IS
    'pgxlock: how much of its limit each key has used; without a row, nothing. A crash or a failover empties '
    'it. Deleting a row gives a full burst; otherwise write it only through the functions. Rows: one for each key; '
    'pgxlock_reap_limits() removes those with nothing used.';
  COMMENT ON COLUMN pgxlock_limits.limit_key IS 'The key that is limited.';
  COMMENT ON COLUMN pgxlock_limits.tat IS
    'When the bucket is full again, in nanoseconds since 1970 by the server''s clock: SELECT to_timestamp(tat / 1e9).';

  ---------------------------------------------------------- callers in SQL --
  CREATE OR REPLACE FUNCTION allow_rate(p_key varchar, p_rate double precision, p_burst integer, p_n integer DEFAULT 1)
  RETURNS boolean
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  BEGIN
    RETURN (SELECT d.granted FROM reserve_rate(p_key, p_rate, p_burst, p_n, interval '0') d);
  END $$;
  COMMENT ON FUNCTION allow_rate(varchar, double precision, integer, integer) IS
    'True if p_n events may happen now, which are counted; p_rate per second on average, at most p_burst at once, '
    'over all callers of the key. Each call is judged by its own rate and burst. False writes and locks nothing; true '
    'keeps the key''s row locked until the transaction ends, and other callers of the key wait for it: call it in a '
    'transaction of its own. A rollback returns the events. READ COMMITTED only.';

  -- The subtransaction drops a row lock that proves useless because others took the rest meanwhile.
  CREATE OR REPLACE FUNCTION reserve_rate(p_key varchar, p_rate double precision, p_burst integer, p_n integer DEFAULT 1,
    p_max_wait interval DEFAULT NULL,
    OUT granted boolean, OUT delay interval)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
  DECLARE
    v_step  bigint;
    v_delay bigint;
  BEGIN
    PERFORM pgxlock_check('p_key', p_key::text);
    IF (p_rate BETWEEN 1e-9::float8 AND 1000000::float8) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_rate must be events per second, between 1e-9 and 1000000, it is %',
          coalesce(p_rate::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_step := (1000000000::float8 / p_rate)::bigint;
    IF (p_burst::bigint BETWEEN 1::bigint AND 3110400000000000000 / v_step) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_burst must be at least 1, and at most what p_rate gives in 100 years, it is %',
          coalesce(p_burst::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (p_n BETWEEN 1 AND p_burst) IS NOT TRUE THEN
      RAISE EXCEPTION 'p_n must be between 1 and p_burst, %, it is %: more never come at once',
          p_burst, coalesce(p_n::text, 'NULL')
        USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_max_wait NOT BETWEEN interval '0' AND interval '100 years'
       OR extract(epoch FROM p_max_wait) NOT BETWEEN 0::numeric AND 3155760000::numeric THEN       -- as pgxlock_ttl()
      RAISE EXCEPTION 'p_max_wait must be between 0 and 100 years, it is %', p_max_wait USING ERRCODE = 'invalid_parameter_value';
    END IF;
    BEGIN
      SELECT d.granted, d.delay INTO granted, v_delay
        FROM pgxlock_limit_batch(v_step, p_burst, ARRAY[p_key::text], ARRAY[p_n],
               ARRAY[least(coalesce((extract(epoch FROM p_max_wait) * 1000000000::numeric)::bigint, 3110400000000000000),
                           3110400000000000000)],
               ARRAY[NULL]::bigint[]) d;
      IF NOT granted THEN
        RAISE EXCEPTION USING ERRCODE = 'LK900';
      END IF;
    EXCEPTION WHEN SQLSTATE 'LK900' THEN
      NULL;
    END;
    delay := ((v_delay + 999::bigint) / 1000::bigint)::float8 * interval '1 microsecond';
  END $$;
  COMMENT ON FUNCTION reserve_rate(varchar, double precision, integer, integer, interval) IS
    'Like allow_rate(), for events that may happen later: if granted, act after delay. If delay would be longer than '
    'p_max_wait (NULL: any), nothing is counted, and delay says when p_n events could happen.';

  ----------------------------------------------------------------- batches --
  -- Entries of one key are decided in their order, as if they came one after the other; keys in the
  -- order of their names, because a key's row stays locked until the transaction ends. Only the
  -- events that were taken last can be returned, as if never taken: later callers keep their
  -- promised times, and with the returned events would make a burst that tat does not show.
  --
  -- granted  taken, for use after delay; or returned
  -- delay    in nanoseconds; of a refused entry, the time after which it would not be
  -- tat      of the key, after this entry
  CREATE OR REPLACE FUNCTION pgxlock_limit_batch(p_step bigint, p_burst integer, p_keys text[], p_counts integer[],
    p_max_waits bigint[], p_unused bigint[])
  RETURNS TABLE (granted boolean, delay bigint, tat bigint)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET plan_cache_mode = force_generic_plan
  SET enable_seqscan = off SET enable_indexscan = on SET enable_bitmapscan = off SET jit = off AS $$
  DECLARE
    v_count   integer := pg_catalog.cardinality(p_keys);
    v_most    bigint := 3110400000000000000;          -- 100 years of 360 days
    v_order   integer[];
    v_from    integer := 1;                           -- the entries of one key in that order
    v_to      integer;
    v_e       integer;
    v_key     text;
    v_locked  boolean;
    v_takes   boolean;
    v_now     bigint;
    v_tat     bigint;
    v_cost    bigint;
    v_delay   bigint;
    v_granted boolean[];
    v_delays  bigint[];
    v_tats    bigint[];
  BEGIN
    IF (v_count <= 1000
        AND pg_catalog.cardinality(p_counts) = v_count
        AND pg_catalog.cardinality(p_max_waits) = v_count
        AND pg_catalog.cardinality(p_unused) = v_count
        AND p_step BETWEEN 1000::bigint AND v_most
        AND p_burst::bigint BETWEEN 1::bigint AND v_most / greatest(p_step, 1000::bigint)) IS NOT TRUE THEN
      PERFORM pgxlock_require(false,
                              'a limit needs a step of 1000 nanoseconds or more, and a burst of 1 or more that fills in '
                              '100 years; p_keys has at most 1000 elements; and every key a count, a wait and what is '
                              'unused');
    END IF;
    FOR i IN 1..v_count LOOP
      IF (char_length(p_keys[i]) BETWEEN 1 AND 255
          AND p_counts[i] BETWEEN 1 AND p_burst
          AND p_max_waits[i] BETWEEN 0::bigint AND v_most) IS NOT TRUE THEN
        PERFORM pgxlock_require(false,
                                'every entry needs a key of 1 to 255 characters, a count of 1 to the burst, and a wait of '
                                '0 to 100 years');
      END IF;
    END LOOP;
    IF pg_is_in_recovery() THEN
      PERFORM pgxlock_check_primary('nothing is counted on a standby server');
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
      PERFORM pgxlock_check_read_committed('limits are counted in READ COMMITTED: an older snapshot does not show what '
                                           'others took');
    END IF;

    v_order := '{1}';
    IF v_count > 1 THEN
      v_order := (SELECT pg_catalog.array_agg(e.n::integer ORDER BY e.key COLLATE "C", e.n)
                    FROM pg_catalog.unnest(p_keys) WITH ORDINALITY AS e (key, n));
    END IF;
    WHILE v_from <= v_count LOOP
      v_key := p_keys[v_order[v_from]];
      v_to := v_from;
      WHILE v_to < v_count AND p_keys[v_order[v_to + 1]] = v_key COLLATE "C" LOOP
        v_to := v_to + 1;
      END LOOP;

      -- Twice: first a plain read, which locks and writes nothing and is the answer if that is no;
      -- then with the row locked. The clock is read after the row each time, so that a wait counts
      -- and no decision uses an old time.
      v_locked := false;
      LOOP
        IF v_locked THEN
          SELECT q.tat INTO v_tat FROM pgxlock_limits q WHERE q.limit_key = v_key COLLATE "C" FOR NO KEY UPDATE;
          IF NOT FOUND THEN
            INSERT INTO pgxlock_limits (limit_key, tat) VALUES (v_key, 0::bigint) ON CONFLICT DO NOTHING;
            CONTINUE;                                 -- it is ours, or another transaction has inserted it
          END IF;
        ELSE
          SELECT q.tat INTO v_tat FROM pgxlock_limits q WHERE q.limit_key = v_key COLLATE "C";
        END IF;
        v_now := pgxlock_limit_clock();
        v_tat := greatest(v_tat, v_now);
        v_takes := false;
        FOR i IN v_from..v_to LOOP
          v_e := v_order[i];
          v_cost := p_counts[v_e]::bigint * p_step;
          IF p_unused[v_e] IS NULL THEN
            v_delay := v_tat - v_now - (p_burst::bigint * p_step - v_cost);
            v_granted[v_e] := v_delay <= p_max_waits[v_e];
            v_delays[v_e] := greatest(v_delay, 0::bigint);
          ELSE                                        -- if no later caller has a promised time
            v_cost := -v_cost;
            v_granted[v_e] := p_unused[v_e] = v_tat AND v_tat > v_now;     -- else the bucket is full already
            v_delays[v_e] := 0;
          END IF;
          IF v_granted[v_e] THEN
            v_takes := true;
            v_tat := greatest(v_tat + v_cost, v_now);
          END IF;
          v_tats[v_e] := v_tat;
        END LOOP;
        EXIT WHEN NOT v_takes;
        IF v_locked THEN
          UPDATE pgxlock_limits q SET tat = v_tat WHERE q.limit_key = v_key COLLATE "C";
          EXIT;
        END IF;
        v_locked := true;
      END LOOP;
      v_from := v_to + 1;
    END LOOP;
    RETURN QUERY SELECT d.granted, d.delay, d.tat FROM unnest(v_granted, v_delays, v_tats) AS d (granted, delay, tat);
  END $$;
  COMMENT ON FUNCTION pgxlock_limit_batch(bigint, integer, text[], integer[], bigint[], bigint[]) IS
    'pgxlock, internal: decides entries by a limit of p_burst and one event in p_step nanoseconds, answers in order. An '
    'entry with p_unused, the tat of an earlier answer, returns its events if they were the last of the key.';

  CREATE OR REPLACE FUNCTION pgxlock_limit_clock() RETURNS bigint
  LANGUAGE sql VOLATILE
  RETURN (extract(epoch FROM clock_timestamp()) * 1000000000::numeric)::bigint;
  COMMENT ON FUNCTION pgxlock_limit_clock() IS 'pgxlock, internal: nanoseconds since 1970.';

  ------------------------------------------------------------ housekeeping --
  -- By pages, so that a pass over a large table reads it once, in small steps. Rows are locked in
  -- key order, as where they are decided, because SKIP LOCKED can still wait: see
  -- pgxlock_remove_dead().
  CREATE OR REPLACE FUNCTION pgxlock_reap_limits(p_page integer DEFAULT 0, p_pages integer DEFAULT 128,
    OUT removed bigint, OUT next_page integer)
  LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET row_security = off SET enable_tidscan = on
  SET enable_seqscan = off AS $$
  DECLARE
    v_now bigint := pgxlock_limit_clock();
  BEGIN
    PERFORM pgxlock_require(p_page >= 0 AND p_pages BETWEEN 1 AND 10000,
                            'p_page must be 0 or more, and p_pages between 1 and 10000');
    WITH idle AS MATERIALIZED (
      SELECT q.limit_key FROM pgxlock_limits q
       WHERE q.ctid >= ('(' || p_page::text || ',0)')::tid
         AND q.ctid < ('(' || (p_page::bigint + p_pages::bigint)::text || ',0)')::tid
         AND q.tat <= v_now
       ORDER BY q.limit_key
         FOR UPDATE OF q SKIP LOCKED
    )
    DELETE FROM pgxlock_limits q USING idle i WHERE q.limit_key = i.limit_key;
    GET DIAGNOSTICS removed = ROW_COUNT;
    next_page := (SELECT (p_page::bigint + p_pages::bigint)::integer
                   WHERE (p_page::bigint + p_pages::bigint)
                         * current_setting('block_size')::bigint < pg_relation_size('pgxlock_limits'::regclass));
  END $$;
  COMMENT ON FUNCTION pgxlock_reap_limits(integer, integer) IS
    'Housekeeping only: removes the rows of keys with nothing used. From p_pages pages of pgxlock_limits, beginning with '
    'p_page; returns how many, and the page to go on with, NULL after the last. Counting never needs it.';

  PERFORM pgxlock_migrate('made'::text, 7, v_path);
END $migration$;
