-- Book one of ten seats: lock until COMMIT, count, insert.
BEGIN;
SELECT lock_tx('event:42');                                 -- waits for the holder
INSERT INTO bookings (event, guest)
SELECT 42, 'alice' WHERE (SELECT count(*) FROM bookings WHERE event = 42) < 10;
COMMIT;

-- The same as a function, which says so when the event is busy for two seconds.
CREATE OR REPLACE FUNCTION book(p_event bigint, p_guest text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  IF NOT lock_tx('event:' || p_event, '2 seconds') THEN
    RETURN 'busy';                                          -- the transaction goes on
  END IF;
  IF (SELECT count(*) FROM bookings WHERE event = p_event) >= 10 THEN
    RETURN 'full';
  END IF;
  INSERT INTO bookings (event, guest) VALUES (p_event, p_guest);
  RETURN 'booked';
END $$;
SELECT book(42, 'bob');

-- Ship an order once, however often this is run. INSERT 0 0: it was shipped.
INSERT INTO shipments (order_id) SELECT 42 WHERE claim_once('order:42:ship');
