-- Takes all of the locks for the caller's transaction or none, one after the other in the
-- order given, and waits for all of them together for at most so long: 0 for not at all.
-- A refusal is caught here, where the server writes it to no log and undoes what the block
-- did: locks and settings. The wait is cut to what the other timeouts leave, which would
-- abort the transaction: to 50 ms before them. Afterwards lock_timeout is what it was.
-- tx/ask.sql gives the arguments; tx/answer.sql answers: 0 refused, else as tx/lock_all.sql.
DO $$
DECLARE
  v_keys         bigint[] := pg_catalog.current_setting('pgxlock.keys');
  v_whats        int[] := pg_catalog.current_setting('pgxlock.whats');
  v_wait         bigint := pg_catalog.current_setting('pgxlock.milliseconds');
  v_lock_timeout text := pg_catalog.current_setting('lock_timeout');
  v_answer       text := CASE WHEN pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ')
                              THEN '1'
                              ELSE '2' END;
  v_deadline     timestamptz := LEAST(
    pg_catalog.statement_timestamp() + pg_catalog.make_interval(secs => v_wait::float8 / 1000::float8),
    pg_catalog.statement_timestamp() - interval '50 ms' + NULLIF(pg_catalog.current_setting('statement_timeout'), '0')::interval,
    pg_catalog.transaction_timestamp() - interval '50 ms'
    + NULLIF(pg_catalog.current_setting('transaction_timeout', true), '0')::interval);
  v_key          bigint;
  v_what         int;
BEGIN
  IF pg_catalog.pg_is_in_recovery() THEN
    v_answer := '3';
  ELSE
    FOR v_key, v_what IN SELECT k.key, k.what
                           FROM ROWS FROM (pg_catalog.unnest(v_keys), pg_catalog.unnest(v_whats)) AS k (key, what) LOOP
      CONTINUE WHEN CASE v_what
        WHEN 0 THEN pg_catalog.pg_try_advisory_xact_lock(v_key)
        WHEN 1 THEN pg_catalog.pg_try_advisory_xact_lock_shared(v_key)
        WHEN 4 THEN pg_catalog.pg_try_advisory_xact_lock((v_key >> 32)::int, (v_key << 32 >> 32)::int)
        WHEN 5 THEN pg_catalog.pg_try_advisory_xact_lock_shared((v_key >> 32)::int, (v_key << 32 >> 32)::int) END;
      IF v_wait = 0::bigint THEN
        RAISE lock_not_available;
      END IF;
      PERFORM pg_catalog.set_config('lock_timeout', GREATEST(1::numeric, LEAST(2147483647::numeric,
                pg_catalog.ceil(1000::numeric * extract(epoch FROM v_deadline - pg_catalog.clock_timestamp()))))::text, true);
      PERFORM CASE v_what WHEN 0 THEN pg_catalog.pg_advisory_xact_lock(v_key)
                          WHEN 1 THEN pg_catalog.pg_advisory_xact_lock_shared(v_key)
                          WHEN 4 THEN pg_catalog.pg_advisory_xact_lock((v_key >> 32)::int, (v_key << 32 >> 32)::int)
                          WHEN 5 THEN pg_catalog.pg_advisory_xact_lock_shared((v_key >> 32)::int, (v_key << 32 >> 32)::int) END;
      PERFORM pg_catalog.set_config('lock_timeout', v_lock_timeout, true);
    END LOOP;
  END IF;
  PERFORM pg_catalog.set_config('pgxlock.answer', v_answer, true);
EXCEPTION WHEN lock_not_available THEN
  PERFORM pg_catalog.set_config('pgxlock.answer', '0', true);
END $$
